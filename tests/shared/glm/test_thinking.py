import pytest

from shared.errors import RequestError
from shared.glm.thinking import thinking_arguments


def test_the_effort_of_the_body_wins() -> None:
    found = thinking_arguments({"reasoning_effort": "high"}, reasoning_effort="low")
    assert found == {"reasoning_effort": "low"}


def test_none_switches_thinking_off() -> None:
    found = thinking_arguments({"enable_thinking": True}, reasoning_effort="none")
    assert found["enable_thinking"] is False


def test_none_in_the_arguments_yields_to_an_explicit_switch() -> None:
    assert thinking_arguments({"reasoning_effort": "none"})["enable_thinking"] is False
    kept = thinking_arguments({"reasoning_effort": "none", "enable_thinking": True})
    assert kept["enable_thinking"] is True


def test_the_vendor_form_maps_to_the_switch_and_the_argument_wins() -> None:
    off = {"type": "disabled", "clear_thinking": False}
    assert thinking_arguments(None, thinking=off) == {
        "enable_thinking": False,
        "clear_thinking": False,
    }
    assert thinking_arguments({"enable_thinking": True}, thinking=off)["enable_thinking"] is True


def test_unknown_levels_and_types_are_refused_by_field() -> None:
    with pytest.raises(RequestError) as caught:
        thinking_arguments(None, reasoning_effort="huge")
    assert caught.value.field == "reasoning_effort"
    with pytest.raises(RequestError) as caught:
        thinking_arguments(None, thinking={"type": "maybe"})
    assert caught.value.field == "thinking.type"
