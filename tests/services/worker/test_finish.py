import numpy as np
import pytest

from services.worker.finish import cut_runs
from services.worker.plan import FinishCode
from services.worker.rows import RowTable
from tests.services.worker.plans import make_capacity, make_sequence

EOS, STOP = 9, 8


def cut(run: list[int], *, prompt: int = 2, outputs: int = 0, **sampling: object) -> tuple:
    table = RowTable(make_capacity(max_model_len=12))
    sampling = {"max_tokens": 100, "eos_token_ids": (EOS,), "stop_token_ids": (STOP,)} | sampling
    assert table.admit(make_sequence(0, [1] * prompt, outputs=[2] * outputs, **sampling))
    kept, codes = cut_runs(table, np.array([0]), np.array([run]), np.array([len(run)]))
    return int(kept[0]), FinishCode(codes[0])


@pytest.mark.parametrize(
    ("run", "sampling", "kept", "code"),
    [
        ([3], {}, 1, FinishCode.GOES_ON),
        ([EOS], {}, 1, FinishCode.EOS),
        ([STOP], {}, 1, FinishCode.STOP_TOKEN),
        ([3, EOS, 4], {}, 2, FinishCode.EOS),
        ([3, STOP, EOS], {}, 2, FinishCode.STOP_TOKEN),
        ([EOS, 3], {"ignore_eos": True}, 2, FinishCode.GOES_ON),
        ([EOS], {"max_tokens": 1}, 1, FinishCode.EOS),
        ([3, 4, 5], {"max_tokens": 2}, 2, FinishCode.MAX_TOKENS),
        ([3, 4, 5], {"max_tokens": 3}, 3, FinishCode.MAX_TOKENS),
        ([EOS, 3, 4, EOS], {"min_tokens": 2}, 4, FinishCode.EOS),
        ([EOS, EOS, EOS], {"min_tokens": 2}, 3, FinishCode.EOS),
        ([EOS, EOS], {"min_tokens": 2, "max_tokens": 2}, 2, FinishCode.MAX_TOKENS),
        ([3] * 11, {}, 10, FinishCode.MAX_MODEL_LEN),
        ([3] * 10, {"max_tokens": 10}, 10, FinishCode.MAX_TOKENS),
    ],
)
def test_a_run_is_cut_at_the_token_that_ends_it(
    run: list[int], sampling: dict, kept: int, code: FinishCode
) -> None:
    assert cut(run, **sampling) == (kept, code)


def test_outputs_of_a_resumed_row_count() -> None:
    assert cut([3, 4], outputs=3, max_tokens=4) == (1, FinishCode.MAX_TOKENS)
    assert cut([EOS], outputs=3, min_tokens=3) == (1, FinishCode.EOS)
    assert cut([EOS], outputs=3, min_tokens=4) == (1, FinishCode.GOES_ON)
    assert cut([3, 4, 5], outputs=8) == (2, FinishCode.MAX_MODEL_LEN)


def test_an_id_that_is_both_counts_as_end_of_sequence() -> None:
    assert cut([EOS], stop_token_ids=(EOS,)) == (1, FinishCode.EOS)


def test_tokens_past_a_run_are_not_looked_at() -> None:
    table = RowTable(make_capacity())
    for row in (0, 1):
        table.admit(make_sequence(row, [1], max_tokens=5, eos_token_ids=(0,)))
    runs, lengths = np.array([[3, 0], [3, 0]]), np.array([1, 2])
    kept, codes = cut_runs(table, np.array([0, 1]), runs, lengths)
    assert kept.tolist() == [1, 2]
    assert codes.tolist() == [FinishCode.GOES_ON, FinishCode.EOS]
