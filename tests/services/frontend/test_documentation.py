"""The documentation page and document."""

import re
from typing import Any

import httpx
import pytest


@pytest.fixture
async def document(lone: httpx.AsyncClient) -> dict[str, Any]:
    return (await lone.get("/openapi.json")).json()


async def test_the_page_loads_nothing_from_other_hosts(lone: httpx.AsyncClient) -> None:
    page = await lone.get("/docs")
    assert page.status_code == 200
    assert "cdn" not in page.text
    assert "https://" not in page.text.replace("https://fastapi", "")
    for asset in ("swagger-ui-bundle.js", "swagger-ui.css"):
        assert (await lone.get(f"/static-offline-docs/{asset}")).status_code == 200


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()


def test_every_reference_of_the_document_leads_somewhere(document: dict[str, Any]) -> None:
    found = references(document)
    assert len(found) > 10
    schemas = document["components"]["schemas"]
    assert {ref.removeprefix("#/components/schemas/") for ref in found} <= set(schemas)


def test_no_endpoint_answers_422(document: dict[str, Any]) -> None:
    for path, methods in document["paths"].items():
        for method in methods.values():
            assert "422" not in method["responses"], path


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_bodies_answers_and_errors_are_described(document: dict[str, Any], path: str) -> None:
    post = document["paths"][path]["post"]
    assert post["requestBody"]["required"]
    assert set(post["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert {"400", "401", "413", "429", "503"} <= set(post["responses"])


def test_fields_that_need_words_have_them(document: dict[str, Any]) -> None:
    fields = document["components"]["schemas"]["ChatRequest"]["properties"]
    for name in (
        "model",
        "temperature",
        "stop",
        "seed",
        "tools",
        "tool_choice",
        "reasoning_effort",
    ):
        assert fields[name].get("description"), name


def test_every_place_in_a_path_is_declared(document: dict[str, Any]) -> None:
    num_places = 0
    for path, methods in document["paths"].items():
        places = re.findall(r"\{(\w+)\}", path)
        num_places += len(places)
        for method in methods.values():
            declared = [p for p in method.get("parameters", ()) if p["in"] == "path"]
            assert [p["name"] for p in declared] == places, path
            assert all(p["required"] and p["schema"] == {"type": "string"} for p in declared)
    assert num_places >= 4


def test_what_pages_of_items_take_is_declared(document: dict[str, Any]) -> None:
    get = document["paths"]["/v1/responses/{response_id}/input_items"]["get"]
    names = {p["name"] for p in get["parameters"] if p["in"] == "query"}
    assert names == {"limit", "order", "after"}
