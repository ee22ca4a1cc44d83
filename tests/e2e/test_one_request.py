"""docs/request.md walks one request through real functions; this test walks beside it."""

import importlib
import re
from pathlib import Path

import httpx
import pytest

from tests.e2e.mesh import SERVICES, Mesh, replay

PAGE = Path(__file__).resolve().parents[2] / "docs" / "request.md"
# `services.frontend.routes.chat:create_chat_completion`, `services.worker.runner:Runner.step`
_NAME = re.compile(r"`((?:services|shared)(?:\.\w+)+):(\w+(?:\.\w+)*)`")


def names_of(text: str) -> list[tuple[str, str]]:
    """(module, qualified name) of everything the page points at."""
    return _NAME.findall(text)


def test_every_function_on_the_page_exists() -> None:
    found = names_of(PAGE.read_text())
    assert len(found) >= 12, "the page walks through too little"
    missing = []
    for module, name in found:
        target: object = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part, None)
        if target is None:
            missing.append(f"{module}:{name}")
    assert not missing


def test_the_page_visits_every_service() -> None:
    visited = {module.split(".")[1] for module, _ in names_of(PAGE.read_text())}
    assert visited >= set(SERVICES)


@pytest.mark.parametrize("stream", [False, True])
def test_one_request_is_found_by_its_id_in_the_logs_of_all_services(
    replayed: Mesh, stream: bool
) -> None:
    answer = httpx.post(
        f"{replayed.url}/v1/chat/completions",
        json={
            "model": "glm-nano",
            "messages": [{"role": "user", "content": "x"}],
            "stream": stream,
            **replay("two words"),
        },
        timeout=30,
    )
    assert answer.status_code == 200
    match = re.search(r'"id": ?"(chatcmpl-[^"]+)"', answer.text)
    assert match is not None
    request_id = match[1]
    for service in SERVICES:
        replayed.until(
            lambda service=service: f"request_id={request_id}" in replayed.log(service),  # type: ignore[misc]  # binds now
            20,
            f"{service} logs the request {request_id}",
        )
