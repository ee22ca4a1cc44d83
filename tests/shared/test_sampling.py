import dataclasses

import pytest

from protos.glm.v1 import common_pb2
from shared.sampling import LoadSnapshot, SamplingSpec, SequenceStats


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (SequenceStats(), common_pb2.SequenceStats),
        (LoadSnapshot(), common_pb2.LoadSnapshot),
    ],
)
def test_values_have_exactly_the_fields_of_their_message(values: object, message: type) -> None:
    names = {field.name for field in dataclasses.fields(values)}  # type: ignore[arg-type]
    assert names == set(message.DESCRIPTOR.fields_by_name)


def test_a_sampling_spec_covers_every_field_of_its_message() -> None:
    names = {field.name for field in dataclasses.fields(SamplingSpec)}
    wire = set(common_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
    wire -= {"logit_bias_token_ids", "logit_bias_values"}
    assert names == wire | {"logit_bias"}


def test_a_sampling_spec_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingSpec().top_k = 3  # type: ignore[misc]
