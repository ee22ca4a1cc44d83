"""What a request makes of its output."""

from typing import Any

import pytest

from services.frontend.schemas.chat import Tool
from services.frontend.submission import ToolChoice
from services.frontend.tool_choice import ToolRules
from services.frontend.tools_constraint import constraint_of, name_field
from shared.constraint import Constraint, FormatKind, TextFormat
from shared.errors import FailureReason, RequestError

FORM = TextFormat(kind=FormatKind.JSON_OBJECT)
PLAIN = Tool.model_validate({"type": "function", "function": {"name": "now"}})
STRICT = Tool.model_validate(
    {
        "type": "function",
        "function": {"name": "add", "strict": True, "parameters": {"properties": {"é": {}}}},
    }
)


def build(
    choice: ToolChoice, *tools: Tool, form: TextFormat | None = None, **changes: Any
) -> Constraint | None:
    rules = ToolRules(choice=choice, tools=tools, is_restricted=changes.pop("is_restricted", False))
    given = {"is_parallel": True, "end_think": 7, "is_replay": False} | changes
    return constraint_of(form, rules, **given)


def test_ordinary_requests_are_free() -> None:
    assert build(ToolChoice.NONE) is None
    assert build(ToolChoice.NONE, STRICT) is None
    assert build(ToolChoice.AUTO, PLAIN) is None


@pytest.mark.parametrize("choice", [ToolChoice.REQUIRED, ToolChoice.NAMED])
def test_demanded_calls_are_all_there_is_behind_the_thinking(choice: ToolChoice) -> None:
    found = build(choice, PLAIN, STRICT, form=FORM)
    assert found is not None
    assert found.calls is not None
    assert found.format is None, "a format does not fit beside them"
    assert found.calls.is_required
    assert found.calls.is_parallel is (choice is ToolChoice.REQUIRED)
    assert found.start_after_token_id == 7
    assert [(t.name, t.parameters_json, t.is_strict) for t in found.calls.tools] == [
        ("now", "", False),
        ("add", '{"properties": {"é": {}}}', True),
    ]
    single = build(choice, PLAIN, is_parallel=False, end_think=None)
    assert single is not None
    assert single.calls is not None
    assert not single.calls.is_parallel
    assert single.start_after_token_id is None


def test_a_form_stands_alone_or_beside_calls() -> None:
    alone = build(ToolChoice.NONE, PLAIN, form=FORM)
    assert alone == Constraint(format=FORM, start_after_token_id=7)
    beside = build(ToolChoice.AUTO, PLAIN, form=FORM)
    assert beside is not None
    assert beside.format == FORM
    assert beside.calls is not None
    assert not beside.calls.is_required


def test_calls_of_strict_or_restricted_tools_are_guarded_and_the_text_is_free() -> None:
    for found in (
        build(ToolChoice.AUTO, PLAIN, STRICT),
        build(ToolChoice.AUTO, PLAIN, is_restricted=True),
    ):
        assert found is not None
        assert found.format is None
        assert found.calls is not None
        assert not found.calls.is_required
        assert found.start_after_token_id is None


def test_the_output_of_a_replay_needs_no_guard() -> None:
    assert build(ToolChoice.AUTO, STRICT, is_replay=True) is None
    assert build(ToolChoice.REQUIRED, STRICT, is_replay=True) is not None


@pytest.mark.parametrize(
    ("field", "message", "param", "text"),
    [
        ("constraint.format", "format: is bad", "guided_json", "Invalid 'guided_json': is bad."),
        (
            "constraint.calls",
            "calls: tool f: no schema",
            "tools",
            "Invalid 'tools': tool f: no schema.",
        ),
        ("constraint", "constraint: too slow", "guided_json", "Invalid 'guided_json': too slow."),
    ],
)
def test_what_the_worker_says_is_told_of_the_field_that_asked(
    field: str, message: str, param: str, text: str
) -> None:
    error = RequestError(FailureReason.INVALID_ARGUMENT, message, field=field, retry_after_ms=5)
    named = name_field(error, "guided_json")
    assert (named.field, named.message, named.reason) == (param, text, error.reason)
    assert named.retry_after_ms == 5


def test_other_errors_stay_what_they_are() -> None:
    for field in (None, "prompt_token_ids"):
        error = RequestError(FailureReason.INTERNAL, "x", field=field)
        assert name_field(error, "tools") is error
