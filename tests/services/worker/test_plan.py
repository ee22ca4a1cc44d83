import pytest

from protos.glm.v1 import worker_pb2
from services.worker.plan import ContractError, FinishCode, StepResult
from shared.errors import FailureReason
from tests.services.worker.plans import make_capacity


def test_finish_codes_have_the_numbers_of_the_contract() -> None:
    names = {code.name: code.value for code in FinishCode}
    wire = {
        name.removeprefix("FINISH_CODE_"): number for name, number in worker_pb2.FinishCode.items()
    }
    assert names == {"GOES_ON": wire.pop("UNSPECIFIED")} | wire


@pytest.mark.parametrize(("length", "blocks"), [(40, 10), (41, 11), (4, 1)])
def test_a_row_holds_the_blocks_of_the_longest_sequence(length: int, blocks: int) -> None:
    assert make_capacity(max_model_len=length).max_blocks_per_row == blocks


def test_a_broken_contract_is_an_invalid_argument() -> None:
    assert ContractError("row 3").reason is FailureReason.INVALID_ARGUMENT


def test_a_result_without_columns_has_empty_ones() -> None:
    result = StepResult(step=1)
    assert len(result.rows) == len(result.sampled_token_ids) == len(result.finish_codes) == 0
