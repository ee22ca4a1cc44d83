"""API keys."""

import hashlib
from typing import Any

import httpx
import pytest

from services.frontend.auth import ApiKeys
from services.frontend.errors import ApiError
from services.frontend.key_file import KeyEntry
from services.frontend.quota import KeyBounds, Quota
from shared.errors import RequestError
from tests.services.frontend.clocks import at
from tests.services.frontend.conftest import Mesh


def scope(header: bytes | None) -> dict[str, Any]:
    return {"headers": [] if header is None else [(b"authorization", header)]}


def test_without_keys_everybody_may_enter() -> None:
    assert ApiKeys([]).tenant_of(scope(None)).tenant_id == ""


@pytest.mark.parametrize(
    "header", [None, b"", b"Bearer", b"Bearer ", b"Basic a", b"a", b"Bearer A", b"Bearer a b"]
)
def test_a_missing_or_wrong_key_is_a_401(header: bytes | None) -> None:
    with pytest.raises(ApiError) as caught:
        ApiKeys(["a", "b"]).tenant_of(scope(header))
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    assert caught.value.type == "invalid_request_error"


def test_each_key_has_its_own_tenant_that_does_not_show_it() -> None:
    keys = ApiKeys(["secret-a", "secret-b"])
    first, second = (
        keys.tenant_of(scope(b"Bearer " + k)).tenant_id for k in (b"secret-a", b"secret-b")
    )
    assert first != second
    assert "secret" not in first + second
    assert keys.tenant_of(scope(b"bearer secret-a")).tenant_id == first


def test_a_key_may_come_as_the_messages_api_sends_it() -> None:
    keys = ApiKeys(["a"])
    own = {"headers": [(b"x-api-key", b"a")]}
    assert keys.tenant_of(own).tenant_id == keys.tenant_of(scope(b"Bearer a")).tenant_id
    both = {"headers": [(b"x-api-key", b"a"), (b"authorization", b"Bearer b")]}
    with pytest.raises(ApiError):
        keys.tenant_of(both)


async def test_a_key_of_a_file_is_known_by_its_digest_and_has_its_own_bounds() -> None:
    digest = hashlib.sha256(b"secret").hexdigest()
    keys = ApiKeys(["open"], [KeyEntry(sha256=digest, id="team-a", max_concurrent_requests=1)])
    tenant = keys.tenant_of(scope(b"Bearer secret"))
    assert tenant.tenant_id == "team-a"
    await tenant.quota.enter(at(0))
    with pytest.raises(RequestError):
        await keys.tenant_of(scope(b"Bearer secret")).quota.enter(at(0))
    await keys.tenant_of(scope(b"Bearer open")).quota.enter(at(0))
    with pytest.raises(ApiError):
        keys.tenant_of(scope(f"Bearer {digest}".encode()))


def test_only_bounded_keys_are_counted_by_who_is_asked_to() -> None:
    asked: list[tuple[bytes, KeyBounds]] = []

    def make(digest: bytes, bounds: KeyBounds) -> Quota:
        asked.append((digest, bounds))
        return Quota(bounds)

    digests = [hashlib.sha256(name).digest() for name in (b"a", b"b")]
    ApiKeys(
        ["open"],
        [
            KeyEntry(sha256=digests[0].hex(), requests_per_minute=3),
            KeyEntry(sha256=digests[1].hex()),
        ],
        make,
    )
    assert asked == [(digests[0], KeyBounds(per_minute=3))]


class TestGuarded:
    """A gateway with keys."""

    @pytest.fixture
    def extra_settings(self) -> dict[str, Any]:
        return {"api_key": ["right", "other"]}

    async def test_v1_asks_for_a_key_and_the_rest_does_not(self, mesh: Mesh) -> None:
        for path in ("/v1/models", "/v1/models/nano", "/v1/nope", "/v1"):
            response = await mesh.http.get(path)
            assert response.status_code == 401, path
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/version", "/metrics", "/openapi.json"):
            assert (await mesh.http.get(path)).status_code == 200, path

    async def test_a_right_key_is_let_in_and_named_to_the_mesh(self, mesh: Mesh) -> None:
        response = await mesh.http.post(
            "/v1/completions",
            json={"prompt": "Hi"},
            headers={"authorization": "Bearer right"},
        )
        assert response.status_code == 200
        assert len(mesh.fake.submits[0].submit.tenant_id) == 16

    async def test_the_documentation_page_offers_a_field_for_the_key(self, mesh: Mesh) -> None:
        document = (await mesh.http.get("/openapi.json")).json()
        assert document["components"]["securitySchemes"]["api_key"]["scheme"] == "bearer"
        assert document["paths"]["/v1/models"]["get"]["security"] == [{"api_key": []}]
        assert "security" not in document["paths"]["/health"]["get"]

    async def test_a_refused_body_is_not_read(self, mesh: Mesh) -> None:
        response = await mesh.http.post("/v1/completions", content=b"x" * 100)
        assert isinstance(response, httpx.Response)
        assert response.status_code == 401
