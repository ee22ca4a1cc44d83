"""Models."""

import httpx

from tests.services.frontend.conftest import NAME, Mesh


async def test_all_names_are_listed_with_the_context_length(lone: httpx.AsyncClient) -> None:
    answer = (await lone.get("/v1/models")).json()
    assert answer["object"] == "list"
    assert [model["id"] for model in answer["data"]] == [NAME, "alias"]
    assert {model["root"] for model in answer["data"]} == {NAME}
    assert {model["max_model_len"] for model in answer["data"]} == {8192}


async def test_one_name_is_found_and_others_are_not(lone: httpx.AsyncClient) -> None:
    first, second = await lone.get("/v1/models/alias"), await lone.get("/v1/models/alias")
    assert first.json()["id"] == "alias"
    assert first.json() == second.json()
    for name in ("nope", "a/b", "%00", "Nano"):
        response = await lone.get(f"/v1/models/{name}")
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"


async def test_the_sdk_reads_models(mesh: Mesh) -> None:
    async with mesh.openai as client:
        assert [model.id async for model in client.models.list()] == [NAME, "alias"]
        assert (await client.models.retrieve("alias")).id == "alias"
