"""Values between scheduler and worker."""

import pytest

from protos.glm.v1 import worker_pb2
from services.scheduler.plan import FinishCode, WorkerContractError
from tests.services.scheduler.builders import capacity


def test_finish_codes_have_the_numbers_of_the_contract() -> None:
    numbers = {value.name: value.number for value in worker_pb2.FinishCode.DESCRIPTOR.values}
    ours = {f"FINISH_CODE_{code.name}": int(code) for code in FinishCode if code}
    assert ours | {"FINISH_CODE_UNSPECIFIED": 0} == numbers


@pytest.mark.parametrize(
    "name",
    ["num_blocks", "block_size_tokens", "num_rows", "max_num_seqs", "max_num_batched_tokens"],
)
def test_a_worker_that_can_hold_nothing_is_refused_by_name(name: str) -> None:
    with pytest.raises(WorkerContractError, match=name):
        capacity(**{name: 0})


def test_a_worker_with_more_drafts_than_a_step_can_hold_is_refused() -> None:
    assert capacity(num_speculative_tokens=15).num_speculative_tokens == 15
    with pytest.raises(WorkerContractError, match="num_speculative_tokens is 16"):
        capacity(num_speculative_tokens=16)
