"""What a file of keys may hold."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.frontend.key_file import read_key_file
from shared.errors import ConfigError

DIGEST = "ab" * 32


def written(tmp_path: Path, value: Any) -> Path:
    path = tmp_path / "keys.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_keys_come_with_their_bounds(tmp_path: Path) -> None:
    entries: Any = [
        {"sha256": DIGEST, "id": "a", "max_concurrent_requests": 3, "requests_per_minute": 9},
        {"sha256": "CD" * 32},
    ]
    first, second = read_key_file(written(tmp_path, entries))
    assert (first.id, first.max_concurrent_requests, first.requests_per_minute) == ("a", 3, 9)
    assert (second.id, second.max_concurrent_requests) == ("", None)
    assert second.digest == b"\xcd" * 32


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("[", "truncated"),
        ({}, "Expected `array`"),
        ([], "no key"),
        ([{"id": "a"}], "sha256"),
        ([{"sha256": "xyz"}], "entry 0: sha256"),
        ([{"sha256": DIGEST}, {"sha256": DIGEST.upper()}], "entry 1: the same key"),
        ([{"sha256": DIGEST, "id": "a b"}], "entry 0: id"),
        ([{"sha256": DIGEST, "key": "secret"}], "unknown field `key`"),
        ([{"sha256": DIGEST, "requests_per_minute": 0}], "requests_per_minute"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, value: Any, told: str) -> None:
    with pytest.raises(ConfigError, match="--api-key-file") as caught:
        read_key_file(written(tmp_path, value))
    assert told in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_key_file(tmp_path / "none")
