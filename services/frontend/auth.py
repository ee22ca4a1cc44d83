"""API keys: who may use /v1, under which id a key's requests are counted, and how many they may be.

Keys are compared in constant time, all of them, whichever matches. Nothing but a digest of a key
is kept.
"""

import hashlib
import hmac
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from starlette.types import Scope

from services.frontend.errors import ApiError
from services.frontend.key_file import KeyEntry
from services.frontend.quota import KeyBounds, KeyQuota, Quota


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Who a key stands for; the empty id is everybody, where no keys are set."""

    tenant_id: str = ""
    quota: KeyQuota = field(default_factory=Quota)


MakeQuota = Callable[[bytes, KeyBounds], KeyQuota]


def own_quota(_digest: bytes, bounds: KeyBounds) -> KeyQuota:
    """Counts of this process alone."""
    return Quota(bounds)


class ApiKeys:
    """The keys of this gateway; none means that everybody may enter.

    Args:
        keys: Without bounds.
        entries: From a file, with their own bounds.
        make_quota: Who counts the requests of a bounded key, known by its digest.
    """

    def __init__(
        self,
        keys: Iterable[str],
        entries: Sequence[KeyEntry] = (),
        make_quota: MakeQuota = own_quota,
    ) -> None:
        """Keep the keys as digests of one length."""
        self._everybody = Tenant()
        self._keys = [
            (_digest(key.encode()), Tenant(tenant_id=_tenant_id(key.encode()))) for key in keys
        ]
        self._keys += [(entry.digest, _tenant_of(entry, make_quota)) for entry in entries]

    def tenant_of(self, scope: Scope) -> Tenant:
        """Whom the caller's key stands for; raises 401."""
        if not self._keys:
            return self._everybody
        token = _bearer_token(scope)
        if token is None:
            raise _unauthorized(
                "You did not provide an API key. Send it as 'Authorization: Bearer KEY'."
            )
        given, found = _digest(token), None
        for key, tenant in self._keys:
            if hmac.compare_digest(given, key):
                found = tenant
        if found is None:
            raise _unauthorized("Incorrect API key provided.")
        return found


def _tenant_of(entry: KeyEntry, make_quota: MakeQuota) -> Tenant:
    bounds = KeyBounds(
        max_concurrent=entry.max_concurrent_requests, per_minute=entry.requests_per_minute
    )
    make = own_quota if bounds == KeyBounds() else make_quota
    return Tenant(tenant_id=entry.id or _tenant_id(entry.digest), quota=make(entry.digest, bounds))


def _bearer_token(scope: Scope) -> bytes | None:
    headers = dict(reversed(scope["headers"]))  # the first of a name counts
    header, own = headers.get(b"authorization", b""), headers.get(b"x-api-key", b"").strip()
    scheme, _, token = header.partition(b" ")
    if not header and own:  # as the Messages API sends it
        return bytes(own)
    return token.strip() if scheme.lower() == b"bearer" and token.strip() else None


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _tenant_id(key: bytes) -> str:
    return hashlib.sha256(b"glm-mesh tenant " + key).hexdigest()[:16]


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
