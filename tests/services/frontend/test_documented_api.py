"""The documented API, tried out by schemathesis against a gateway before a fake detokenizer.

A bounded run: server errors, statuses, content types and bodies that the document does not name.
"""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from services.frontend.process import at_work, build_gateway, listening
from services.frontend.settings import FrontendSettings
from tests.services.frontend.conftest import MODEL_DIR
from tests.services.frontend.fake_detokenizer import FakeDetokenizer

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
EXAMPLES = settings(
    max_examples=6,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


async def serve(folder: Path, is_up: threading.Event, found: dict[str, Any]) -> None:
    """A gateway in a thread of its own: the prober is synchronous."""
    stop = asyncio.Event()
    found["stop"] = (asyncio.get_running_loop(), stop)
    fake = FakeDetokenizer(f"unix:{folder}/d.sock")
    await fake.start()
    gateway = build_gateway(
        FrontendSettings(
            address=f"unix:{folder}/f.sock",
            detokenizer_address=fake.address,
            model=MODEL_DIR,
            port=0,
        )
    )
    async with at_work(gateway), listening(gateway) as http:
        while gateway.not_ready_reason:  # noqa: ASYNC110  # told by no event
            await asyncio.sleep(0.01)
        found["url"] = f"http://127.0.0.1:{http.port}"
        is_up.set()
        await stop.wait()
    await fake.stop()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    found: dict[str, Any] = {}
    is_up = threading.Event()
    folder = tmp_path_factory.mktemp("s")
    thread = threading.Thread(target=lambda: asyncio.run(serve(folder, is_up, found)))
    thread.start()
    assert is_up.wait(60)
    yield found["url"]
    loop, stop = found["stop"]
    loop.call_soon_threadsafe(stop.set)
    thread.join(20)


# A third of a minute on two quiet cores.
@pytest.mark.timeout(400)
def test_the_documented_api_is_what_is_served(url: str) -> None:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) > 15
    for operation in operations:
        check(operation)


def check(operation: Any) -> None:
    strategy: st.SearchStrategy[Any] = operation.as_strategy()

    @EXAMPLES
    @given(case=strategy)
    def try_out(case: Any) -> None:
        response = case.call()
        case.validate_response(response, checks=CHECKS)

    try_out()
