"""Between `shared.constraint` and its messages of glm.v1."""

from typing import cast

from protos.glm.v1 import constraint_pb2
from shared.constraint import CalledTool, CallRules, Constraint, FormatKind, TextFormat
from shared.errors import FailureReason, RequestError

_KINDS = {int(kind): kind for kind in FormatKind}


def constraint_to_proto(constraint: Constraint | None) -> constraint_pb2.OutputConstraint | None:
    """A constraint as its message, None as None."""
    if constraint is None:
        return None
    return constraint_pb2.OutputConstraint(
        format=None if constraint.format is None else _format_to_proto(constraint.format),
        calls=None if constraint.calls is None else _calls_to_proto(constraint.calls),
        start_after_token_id=constraint.start_after_token_id,
    )


def constraint_from_proto(message: constraint_pb2.OutputConstraint) -> Constraint:
    """A message as a constraint; `RequestError` for a kind that nobody knows."""
    has_start = message.HasField("start_after_token_id")
    return Constraint(
        format=_format_from_proto(message.format) if message.HasField("format") else None,
        calls=_calls_from_proto(message.calls) if message.HasField("calls") else None,
        start_after_token_id=message.start_after_token_id if has_start else None,
    )


def _format_to_proto(given: TextFormat) -> constraint_pb2.TextFormat:
    return constraint_pb2.TextFormat(
        kind=cast("constraint_pb2.TextFormatKind", int(given.kind)),  # any int, at run time
        text=given.text,
        choices=given.choices,
        is_strict=given.is_strict,
        is_compact=not given.has_whitespace,
        whitespace_pattern=given.whitespace_pattern,
    )


def _format_from_proto(message: constraint_pb2.TextFormat) -> TextFormat:
    kind = _KINDS.get(message.kind)
    if kind is None:
        raise RequestError(
            FailureReason.INVALID_ARGUMENT,
            f"constraint.format.kind {message.kind} is not known",
            field="constraint.format.kind",
        )
    return TextFormat(
        kind=kind,
        text=message.text,
        choices=tuple(message.choices),
        is_strict=message.is_strict,
        has_whitespace=not message.is_compact,
        whitespace_pattern=message.whitespace_pattern,
    )


def _calls_to_proto(calls: CallRules) -> constraint_pb2.CallConstraint:
    return constraint_pb2.CallConstraint(
        tools=[
            constraint_pb2.CalledTool(
                name=tool.name, parameters_json=tool.parameters_json, is_strict=tool.is_strict
            )
            for tool in calls.tools
        ],
        is_required=calls.is_required,
        is_single=not calls.is_parallel,
    )


def _calls_from_proto(message: constraint_pb2.CallConstraint) -> CallRules:
    return CallRules(
        tools=tuple(
            CalledTool(
                name=tool.name, parameters_json=tool.parameters_json, is_strict=tool.is_strict
            )
            for tool in message.tools
        ),
        is_required=message.is_required,
        is_parallel=not message.is_single,
    )
