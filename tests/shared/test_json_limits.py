import json
from typing import Any

import pytest

from shared.json_limits import MAX_DEPTH, is_portable, nests_within


def nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"k": value}
    return value


def test_levels_are_counted_to_the_bound_without_recursion() -> None:
    assert nests_within(nested(MAX_DEPTH))
    assert not nests_within(nested(MAX_DEPTH + 1))
    assert not nests_within(nested(100_000))
    assert nests_within(1, 0)
    assert nests_within([1], 1)
    assert not nests_within([1, {}], 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": ["x", 1, null, true]}', True),
        ('"\\ud83d\\ude00"', True),
        ('"\\ud83d"', False),
        ('{"a": [{"b": "\\udc00"}]}', False),
        ('{"\\ud800": 1}', False),
        ("[" * 64 + "]" * 64, True),
        ("[" * 65 + "]" * 65, False),
    ],
)
def test_what_no_writer_can_carry_is_told(text: str, expected: bool) -> None:
    assert is_portable(json.loads(text)) is expected
