"""What a request makes of its output: a format, calls in the model's own form, or either.

Calls that are demanded or come from strict tools are constrained, never as JSON. The thinking that
the prompt opened is free; the constraint holds behind its end.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Final

from services.frontend.submission import Submission, ToolChoice
from services.frontend.tool_choice import ToolRules
from shared.constraint import CalledTool, CallRules, Constraint, TextFormat
from shared.errors import RequestError

_CALLS: Final = "constraint.calls"


def constraint_of(
    form: TextFormat | None,
    rules: ToolRules,
    *,
    is_parallel: bool,
    end_think: int | None,
    is_replay: bool,
) -> Constraint | None:
    """The constraint of a chat, None where the output is free.

    Args:
        form: Asked of the text; calls that are demanded leave no room for it.
        rules: Which calls there may be.
        is_parallel: Whether there may be several.
        end_think: Ends the thinking that the prompt opened, if it did.
        is_replay: The output is the client's own: what only guards it has no place.
    """
    if rules.choice in (ToolChoice.REQUIRED, ToolChoice.NAMED):
        is_single = not is_parallel or rules.choice is ToolChoice.NAMED
        calls = _calls(rules, is_required=True, is_parallel=not is_single)
        return Constraint(calls=calls, start_after_token_id=end_think)
    may_call = rules.choice is ToolChoice.AUTO and bool(rules.tools)
    if form is not None:
        beside = _calls(rules, is_required=False, is_parallel=is_parallel) if may_call else None
        return Constraint(format=form, calls=beside, start_after_token_id=end_think)
    is_guarded = rules.is_restricted or any(tool.function.strict for tool in rules.tools)
    if may_call and is_guarded and not is_replay:
        # Ordinary text and thinking stay free: it holds inside calls alone.
        return Constraint(calls=_calls(rules, is_required=False, is_parallel=is_parallel))
    return None


def name_field(error: RequestError, constraint_param: str) -> RequestError:
    """What the worker says of a constraint, in the words of the field that asked for it."""
    if error.field is None or not error.field.startswith("constraint"):
        return error
    param = "tools" if error.field == _CALLS else constraint_param
    reason = error.message.partition(": ")[2] or error.message
    return RequestError(
        error.reason,
        f"Invalid '{param}': {reason}.",
        field=param,
        retry_after_ms=error.retry_after_ms,
    )


def renamed_constraint(submission: Submission, names: Mapping[str, str]) -> Submission:
    """The same with the name that another protocol has for the field."""
    param = submission.constraint_param
    return dataclasses.replace(submission, constraint_param=names.get(param, param))


def _calls(rules: ToolRules, *, is_required: bool, is_parallel: bool) -> CallRules:
    return CallRules(
        tools=tuple(
            CalledTool(
                name=tool.function.name,
                parameters_json=""
                if tool.function.parameters is None
                else json.dumps(tool.function.parameters, ensure_ascii=False),
                is_strict=bool(tool.function.strict),
            )
            for tool in rules.tools
        ),
        is_required=is_required,
        is_parallel=is_parallel,
    )
