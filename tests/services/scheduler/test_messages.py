"""Values between scheduler and clients."""

from protos.glm.v1 import common_pb2, scheduler_pb2
from services.scheduler.messages import AbortReason, FinishReason


def test_reasons_have_the_numbers_of_the_contract() -> None:
    finish = {v.name: v.number for v in common_pb2.FinishReason.DESCRIPTOR.values}
    ours = {f"FINISH_REASON_{reason.name}": int(reason) for reason in FinishReason}
    assert ours | {"FINISH_REASON_UNSPECIFIED": 0} == finish
    abort = {v.name: v.number for v in scheduler_pb2.AbortReason.DESCRIPTOR.values}
    ours = {f"ABORT_REASON_{reason.name}": int(reason) for reason in AbortReason}
    assert ours | {"ABORT_REASON_UNSPECIFIED": 0} == abort
