from typing import Any

import pytest

from services.launcher.options.additional import AdditionalConfig
from services.launcher.options.fields import drop, known_keys, read_json, spelled
from services.launcher.options.json_flags import KvTransferConfig
from shared.errors import ConfigError


def test_json_over_several_lines_is_read() -> None:
    assert read_json("--x", '{\n  "a": [1, 2],\n  "b": {"c": "d"}\n}') == {
        "a": [1, 2],
        "b": {"c": "d"},
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1', "--x: no JSON: .* at line 1 column 8"),
        ('{\n"a": tru\n}', "--x: no JSON: .* at line 2"),
        ('{"a": 1, "a": 2}', "--x: a is given twice"),
        ('{"a": NaN}', "--x: NaN is no JSON number"),
        ("[1]", r"--x \[1\]: must be a JSON object"),
        ("3", "--x 3: must be a JSON object"),
        ("", "--x: no JSON"),
        ('{"a":' * 100_000, "--x: cannot be read"),
        ('{"a": ' + "9" * 5000 + "}", "--x: cannot be read"),
    ],
)
def test_a_mistake_in_json_names_the_flag_and_the_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_json("--x", text)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        ("a b", "a b"),
        ([4, 8], "[4,8]"),
        (0.92, "0.92"),
        (frozenset("ba"), '["a","b"]'),
    ],
)
def test_values_are_written_as_in_json(value: object, text: str) -> None:
    assert spelled(value) == text


def test_keys_of_groups_inside_groups_are_known() -> None:
    assert {"enable_dsa_cp", "dynamic_eplb", "enable_static_kernel"} <= known_keys(AdditionalConfig)
    assert {"kv_role", "tp_size", "connectors"} <= known_keys(KvTransferConfig)


@pytest.mark.parametrize(
    ("path", "left"),
    [
        (("f", "a"), {"f": {"b": {"c": 2}}, "g": "x"}),
        (("f", "b", "c"), {"f": {"a": 1}, "g": "x"}),
        (("f", "missing"), {"g": "x"}),
        (("g",), {"f": {"a": 1, "b": {"c": 2}}}),
    ],
)
def test_a_wrong_value_goes_alone_where_it_can(path: tuple[str, ...], left: dict[str, Any]) -> None:
    content: dict[str, Any] = {"f": {"a": 1, "b": {"c": 2}}, "g": "x"}
    drop(content, path)
    assert content == left
