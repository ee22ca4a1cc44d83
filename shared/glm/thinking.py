"""How a request switches thinking: three spellings of one wish, turned into template arguments.

`reasoning_effort` of the body wins over the one in `chat_template_kwargs`; "none" switches thinking
off. Every other level goes to the template as it is: GLM-5.2 knows `high` and takes all others as
its maximum. The vendor's `thinking: {"type": "enabled" | "disabled"}` sets `enable_thinking` unless
`chat_template_kwargs` has it.
"""

from collections.abc import Mapping
from typing import Any

from shared.errors import FailureReason, RequestError

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def thinking_arguments(
    template_kwargs: Mapping[str, Any] | None,
    *,
    reasoning_effort: str | None = None,
    thinking: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Template arguments for a request; `RequestError` for a level or type nobody knows."""
    arguments = dict(template_kwargs or {})
    if thinking is not None:
        arguments.setdefault("enable_thinking", _is_enabled(thinking))
        if "clear_thinking" in thinking:
            arguments.setdefault("clear_thinking", bool(thinking["clear_thinking"]))
    if reasoning_effort is not None:
        if reasoning_effort not in EFFORTS:
            raise RequestError(
                FailureReason.INVALID_ARGUMENT,
                f"reasoning_effort must be one of {', '.join(EFFORTS)}",
                field="reasoning_effort",
            )
        arguments["reasoning_effort"] = reasoning_effort
    if arguments.get("reasoning_effort") == "none":
        is_from_body = reasoning_effort == "none"
        if is_from_body or arguments.get("enable_thinking") is None:
            arguments["enable_thinking"] = False
    return arguments


def _is_enabled(thinking: Mapping[str, Any]) -> bool:
    kind = thinking.get("type")
    if kind not in ("enabled", "disabled"):
        raise RequestError(
            FailureReason.INVALID_ARGUMENT,
            "thinking.type must be enabled or disabled",
            field="thinking.type",
        )
    return bool(kind == "enabled")
