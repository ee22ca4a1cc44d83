"""`tool_choice` in all its forms."""

from typing import Any

import pytest

from services.frontend.errors import ApiError
from services.frontend.schemas.chat import ChatRequest
from services.frontend.submission import ToolChoice
from services.frontend.tool_choice import ToolRules, tool_rules_of
from services.frontend.validation import parse

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("now", "get_weather", "add")]


def rules(choice: Any = None, tools: Any = TOOLS, *, has_parser: bool = True) -> ToolRules:
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools, "tool_choice": choice}
    return tool_rules_of(parse(ChatRequest, body), has_parser=has_parser)


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [named(name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def names_of(found: ToolRules) -> list[str]:
    return [tool.function.name for tool in found.tools]


def test_the_choice_is_auto_with_tools_and_none_without() -> None:
    assert rules(tools=None).choice is ToolChoice.NONE
    assert rules().choice is ToolChoice.AUTO
    assert rules("auto").choice is ToolChoice.AUTO
    assert rules("none").choice is ToolChoice.NONE
    assert rules("none", tools=None).choice is ToolChoice.NONE


def test_calls_can_be_demanded_of_any_tool_or_of_one() -> None:
    found = rules("required")
    assert found.choice is ToolChoice.REQUIRED
    assert names_of(found) == ["now", "get_weather", "add"]
    found = rules(named("add"))
    assert found.choice is ToolChoice.NAMED
    assert (found.name, names_of(found)) == ("add", ["add"])


def test_tools_can_be_restricted_in_the_order_of_their_declaration() -> None:
    found = rules(allowed("auto", "add", "now", "add"))
    assert found.choice is ToolChoice.AUTO
    assert names_of(found) == ["now", "add"]
    assert found.is_restricted
    found = rules(allowed("required", "now", "get_weather", "add"))
    assert found.choice is ToolChoice.REQUIRED
    assert not found.is_restricted


def test_tools_without_a_parser_are_refused() -> None:
    with pytest.raises(ApiError, match="without a tool call parser"):
        rules(has_parser=False)


@pytest.mark.parametrize(
    ("choice", "param", "text"),
    [
        ("always", "tool_choice", "'none', 'auto', 'required'"),
        (3, "tool_choice", "expected a string or an object"),
        ({"type": "custom"}, "tool_choice.type", "'function', 'allowed_tools'"),
        ({}, "tool_choice.type", "Supported values"),
        ({"type": "function"}, "tool_choice.function.name", "Missing"),
        ({"type": "function", "function": {"name": 3}}, "tool_choice.function.name", "a string"),
        ({"type": "function", "function": []}, "tool_choice.function", "an object"),
        ({"type": []}, "tool_choice.type", "a string"),
        (named("nope"), "tool_choice.function.name", "'nope' is not among"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools", "Missing"),
        (allowed("never", "now"), "tool_choice.allowed_tools.mode", "'auto', 'required'"),
        (allowed("auto"), "tool_choice.allowed_tools.tools", "at least one tool"),
        (
            allowed("auto", "now", "nope"),
            "tool_choice.allowed_tools.tools[1].function.name",
            "'nope' is not among",
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [3]}},
            "tool_choice.allowed_tools.tools[0]",
            "an object",
        ),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "custom"}]},
            },
            "tool_choice.allowed_tools.tools[0]",
            "only functions",
        ),
        (
            {"type": "allowed_tools", "allowed_tools": 5},
            "tool_choice.allowed_tools",
            "an object",
        ),
        *(
            (
                {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named("now")]}},
                "tool_choice.allowed_tools.mode",
                "expected a string",
            )
            for mode in ([], {}, 5, True)
        ),
    ],
)
def test_a_choice_that_fits_nothing_is_refused_where_it_is_wrong(
    choice: Any, param: str, text: str
) -> None:
    with pytest.raises(ApiError, match=text) as caught:
        rules(choice)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("choice", ["auto", "required", named("now")])
def test_a_choice_without_tools_is_refused(choice: Any) -> None:
    with pytest.raises(ApiError, match="only allowed when 'tools'"):
        rules(choice, tools=None)
