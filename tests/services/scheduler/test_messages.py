"""Values between scheduler and clients."""

import dataclasses

import pytest

from protos.glm.v1 import scheduler_pb2
from services.scheduler import messages


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (messages.Submission, scheduler_pb2.TokenSubmit),
        (messages.Verdict, scheduler_pb2.Verdict),
        (messages.TokenColumns, scheduler_pb2.TokenColumns),
    ],
)
def test_values_have_exactly_the_fields_of_their_message(ours: type, theirs: type) -> None:
    """A field added to the contract alone would be dropped without a word."""
    names = {field.name for field in dataclasses.fields(ours)}
    assert names == set(theirs.DESCRIPTOR.fields_by_name)  # type: ignore[attr-defined]  # protobuf
