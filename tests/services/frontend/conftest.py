"""A gateway on a loopback port, before a fake detokenizer on a unix socket."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from openai import AsyncOpenAI
from starlette.types import Receive, Scope, Send

from services.frontend.app import create_app
from services.frontend.gateway import Gateway
from services.frontend.http_server import HttpServer
from services.frontend.process import at_work, build_gateway, listening
from services.frontend.settings import FrontendSettings
from shared.glm.dialect import Dialect
from tests.services.frontend.fake_detokenizer import FakeDetokenizer

MODEL_DIR = Path(__file__).resolve().parents[3] / "models" / "glm-nano"
NAME = "nano"


@dataclass
class Mesh:
    """What a test talks to."""

    gateway: Gateway
    fake: FakeDetokenizer
    http: httpx.AsyncClient
    server: HttpServer
    _openai: AsyncOpenAI | None = None

    @property
    def port(self) -> int:
        """Where the gateway listens."""
        return self.server.port

    @property
    def openai(self) -> AsyncOpenAI:
        """The SDK, pointed here; closed with the mesh."""
        if self._openai is None or self._openai.is_closed():
            url = f"http://127.0.0.1:{self.port}/v1"
            self._openai = AsyncOpenAI(base_url=url, api_key="k", max_retries=0)
        return self._openai

    async def close(self) -> None:
        if self._openai is not None:
            await self._openai.close()

    async def chat(self, **fields: Any) -> httpx.Response:
        body = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], **fields}
        return await self.http.post("/v1/chat/completions", json=body)

    async def complete(self, **fields: Any) -> httpx.Response:
        return await self.http.post(
            "/v1/completions", json={"model": NAME, "prompt": "Hi", **fields}
        )

    async def wait_until_connected(self) -> None:
        async with asyncio.timeout(30):
            while self.gateway.not_ready_reason:  # noqa: ASYNC110  # told by no event
                await asyncio.sleep(0.01)


async def teapot(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that is told from a gateway by each of its answers."""
    await send({"type": "http.response.start", "status": 418, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A short private folder: socket paths have little room."""
    with tempfile.TemporaryDirectory(prefix="glm", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def dialect() -> Dialect:
    return Dialect.load(MODEL_DIR)


@pytest.fixture(scope="session")
def lone_gateway() -> Gateway:
    """A gateway without a detokenizer: what passes all checks ends in 503 there."""
    return build_gateway(
        FrontendSettings(
            address="unix:/tmp/none.sock",
            detokenizer_address="unix:/tmp/none-d.sock",
            model=MODEL_DIR,
            served_model_name=[NAME, "alias"],
        )
    )


@pytest.fixture(scope="session")
def lone_app(lone_gateway: Gateway) -> FastAPI:
    return create_app(lone_gateway)


@pytest.fixture
async def lone(lone_app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """A client of that gateway, in this process."""
    transport = httpx.ASGITransport(lone_app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client


@pytest.fixture
def extra_settings() -> dict[str, Any]:
    """Settings that a test module or class wants different."""
    return {}


@pytest.fixture
def settings(run_dir: Path, extra_settings: dict[str, Any]) -> FrontendSettings:
    values: dict[str, Any] = {
        "address": f"unix:{run_dir}/f.sock",
        "detokenizer_address": f"unix:{run_dir}/d.sock",
        "model": MODEL_DIR,
        "port": 0,
        "served_model_name": [NAME, "alias"],
        **extra_settings,
    }
    return FrontendSettings(**values)


@pytest.fixture
async def mesh(settings: FrontendSettings) -> AsyncIterator[Mesh]:
    fake = FakeDetokenizer(settings.detokenizer_address[0])
    await fake.start()
    gateway = build_gateway(settings)
    async with at_work(gateway), listening(gateway) as http:
        url = f"http://127.0.0.1:{http.port}"
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            mesh = Mesh(gateway, fake, client, http)
            await mesh.wait_until_connected()
            yield mesh
            await mesh.close()
    await fake.stop()
