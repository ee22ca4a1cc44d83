import enum

import pytest
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

from protos.glm.v1 import common_pb2, scheduler_pb2
from shared.endings import AbortReason, FinishReason


@pytest.mark.parametrize(
    ("ours", "theirs", "prefix"),
    [
        (FinishReason, common_pb2.FinishReason, "FINISH_REASON_"),
        (AbortReason, scheduler_pb2.AbortReason, "ABORT_REASON_"),
    ],
)
def test_reasons_have_the_numbers_of_the_contract(
    ours: type[enum.IntEnum], theirs: EnumTypeWrapper, prefix: str
) -> None:
    named = {f"{prefix}{reason.name}": int(reason) for reason in ours}
    assert named | {f"{prefix}UNSPECIFIED": 0} == dict(theirs.items())
