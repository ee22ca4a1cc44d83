"""Constraints between values and messages."""

import pytest

from protos.glm.v1 import constraint_pb2
from shared.constraint import CalledTool, CallRules, Constraint, FormatKind, TextFormat
from shared.errors import RequestError
from shared.sampling import SamplingSpec
from shared.wire import sampling_from_proto, sampling_to_proto
from shared.wire_constraint import constraint_from_proto, constraint_to_proto

TOOL = CalledTool(name="now", parameters_json='{"type":"object"}', is_strict=True)


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint(format=TextFormat(kind=FormatKind.JSON_OBJECT)),
        Constraint(
            format=TextFormat(
                kind=FormatKind.JSON_SCHEMA,
                text='{"type":"integer"}',
                is_strict=True,
                has_whitespace=False,
                whitespace_pattern="[ ]?",
            ),
            start_after_token_id=0,
        ),
        Constraint(format=TextFormat(kind=FormatKind.CHOICE, choices=("a", "b"))),
        Constraint(calls=CallRules(tools=(TOOL,), is_required=True, is_parallel=False)),
        Constraint(
            format=TextFormat(kind=FormatKind.GRAMMAR, text='start: "a"'),
            calls=CallRules(tools=(TOOL, CalledTool(name="b"))),
            start_after_token_id=848,
        ),
    ],
)
def test_a_constraint_crosses_the_wire_unchanged_inside_its_sampling(
    constraint: Constraint,
) -> None:
    message = constraint_to_proto(constraint)
    assert message is not None
    assert constraint_from_proto(message) == constraint
    spec = SamplingSpec(constraint=constraint)
    assert sampling_from_proto(sampling_to_proto(spec)) == spec


def test_no_constraint_is_no_message() -> None:
    assert constraint_to_proto(None) is None
    assert not sampling_to_proto(SamplingSpec()).HasField("constraint")


@pytest.mark.parametrize("kind", [0, 99])
def test_a_kind_that_nobody_knows_is_refused_by_name(kind: int) -> None:
    message = constraint_pb2.OutputConstraint()
    message.format.kind = kind  # type: ignore[assignment]  # any int, at run time
    with pytest.raises(RequestError, match=f"kind {kind} is not known"):
        constraint_from_proto(message)
