"""API keys from a file: digests, so that the file gives no key away, and what each key may do.

A JSON list of objects: `sha256` (hex digits of the key's SHA-256), and if wanted `id` (what the key
is called inside the mesh), `max_concurrent_requests` and `requests_per_minute`.
"""

import re
from pathlib import Path
from typing import Annotated

import msgspec

from shared.errors import ConfigError

_DIGEST = re.compile("[0-9a-fA-F]{64}")
_ID = re.compile(r"[\w.@:-]{1,64}", re.ASCII)

AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One key."""

    sha256: str
    id: str = ""
    max_concurrent_requests: AtLeastOne | None = None
    requests_per_minute: AtLeastOne | None = None

    @property
    def digest(self) -> bytes:
        """The key's SHA-256."""
        return bytes.fromhex(self.sha256)


def read_key_file(path: Path) -> list[KeyEntry]:
    """The keys of a file; `ConfigError` says what is wrong with which entry."""
    try:
        entries = msgspec.json.decode(path.read_bytes(), type=list[KeyEntry])
    except OSError as error:
        raise ConfigError(f"--api-key-file {path}: {error.strerror}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"--api-key-file {path}: {error}") from None
    seen: set[bytes] = set()
    for number, entry in enumerate(entries):
        where = f"--api-key-file {path}: entry {number}"
        if not _DIGEST.fullmatch(entry.sha256):
            raise ConfigError(f"{where}: sha256 must be 64 hex digits")
        if entry.id and not _ID.fullmatch(entry.id):
            raise ConfigError(f"{where}: id {entry.id!r} must be 1 to 64 letters, digits or .@:-_")
        if entry.digest in seen:
            raise ConfigError(f"{where}: the same key stands there twice")
        seen.add(entry.digest)
    if not entries:
        raise ConfigError(f"--api-key-file {path}: holds no key; nobody could enter")
    return entries
