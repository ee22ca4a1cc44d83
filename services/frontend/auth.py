"""API keys: who may use /v1, and under which id a key's requests are counted.

Keys are compared in constant time, all of them, whichever matches. Nothing but a digest of a key
leaves this module.
"""

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import Scope

from services.frontend.errors import ApiError


class ApiKeys:
    """The keys of this gateway; none means that everybody may enter."""

    def __init__(self, keys: Iterable[str]) -> None:
        """Keep the keys as digests of one length."""
        self._keys = [(_digest(key.encode()), _tenant_id(key)) for key in keys]

    def tenant_of(self, scope: Scope) -> str:
        """The id of the caller's key, empty where no keys are set; raises 401."""
        if not self._keys:
            return ""
        token = _bearer_token(scope)
        if token is None:
            raise _unauthorized(
                "You did not provide an API key. Send it as 'Authorization: Bearer KEY'."
            )
        given, found = _digest(token), None
        for key, tenant_id in self._keys:
            if hmac.compare_digest(given, key):
                found = tenant_id
        if found is None:
            raise _unauthorized("Incorrect API key provided.")
        return found


def _bearer_token(scope: Scope) -> bytes | None:
    headers = dict(reversed(scope["headers"]))  # the first of a name counts
    header, own = headers.get(b"authorization", b""), headers.get(b"x-api-key", b"").strip()
    scheme, _, token = header.partition(b" ")
    if not header and own:  # as the Messages API sends it
        return bytes(own)
    return token.strip() if scheme.lower() == b"bearer" and token.strip() else None


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _tenant_id(key: str) -> str:
    return hashlib.sha256(b"glm-mesh tenant " + key.encode()).hexdigest()[:16]


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
