from typing import Any

import pytest

from shared.json_pointer import resolve_pointer

ROOT = {"a": {"b/c": [10, {"~": 20}]}, "": 30, "%": {"x": 40}}


@pytest.mark.parametrize(
    ("reference", "found"),
    [
        ("#", ROOT),
        ("#/a/b~1c/0", 10),
        ("#/a/b~1c/1/~0", 20),
        ("#/", 30),
        ("#/%25/x", 40),
        ("#/a/b~1c/2", None),
        ("#/a/b~1c/01", None),
        ("#/a/b~1c/-1", None),
        ("#/a/b~1c/9999999999", None),
        ("#/a/none/x", None),
        ("#/a/b~1c/0/x", None),
        ("other.json#/a", None),
        (3, None),
    ],
)
def test_a_reference_is_what_it_points_to_or_nothing(reference: Any, found: Any) -> None:
    assert resolve_pointer(reference, ROOT) == found
