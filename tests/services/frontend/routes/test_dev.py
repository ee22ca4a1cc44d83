"""A reset of the prefix caches over HTTP: there only where it is asked for, behind the keys."""

from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from tests.services.frontend.conftest import Mesh

PATH = "/reset_prefix_cache"


async def test_the_route_is_not_there_by_default(lone: httpx.AsyncClient) -> None:
    response = await lone.post(PATH)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_url")


class TestSwitchedOn:
    """With the route."""

    @pytest.fixture
    def extra_settings(self) -> dict[str, Any]:
        return {"enable_dev_routes": True}

    async def test_a_reset_reaches_the_mesh_and_says_what_was_there(self, mesh: Mesh) -> None:
        response = await mesh.http.post(PATH)
        assert (response.status_code, response.json()) == (200, {"num_blocks": 12})
        assert mesh.fake.num_resets == 1
        assert (await mesh.http.get(PATH)).status_code == 405
        assert PATH in (await mesh.http.get("/openapi.json")).json()["paths"]

    async def test_without_the_mesh_it_is_a_503(self, mesh: Mesh) -> None:
        await mesh.fake.stop()
        response = await mesh.http.post(PATH)
        assert response.status_code == 503


class TestWithKeys:
    """With the route, and keys."""

    @pytest.fixture
    def extra_settings(self) -> dict[str, Any]:
        return {"enable_dev_routes": True, "api_key": [SecretStr("secret")]}

    async def test_nobody_resets_without_a_key(self, mesh: Mesh) -> None:
        assert (await mesh.http.post(PATH)).status_code == 401
        headers = {"authorization": "Bearer secret"}
        assert (await mesh.http.post(PATH, headers=headers)).status_code == 200
        assert mesh.fake.num_resets == 1
