from typing import Any

import numpy as np
import pytest

from services.worker.plan import ContractError
from services.worker.rows import ENDED, FREE, RUNNING, RowTable, ending_ids
from shared.errors import FailureReason, RequestError
from shared.sampling import SamplingSpec
from tests.services.worker.plans import make_capacity, make_sequence


@pytest.fixture
def table() -> RowTable:
    return RowTable(make_capacity())


def test_an_admitted_row_holds_prompt_then_outputs(table: RowTable) -> None:
    assert table.admit(make_sequence(2, [5, 6, 7], outputs=[8], computed=2))
    assert table.state[2] == RUNNING
    assert table.tokens[2, :4].tolist() == [5, 6, 7, 8]
    assert (table.num_prompt[2], table.num_tokens[2], table.num_computed[2]) == (3, 4, 2)


def test_a_row_in_use_or_out_of_range_breaks_the_contract(table: RowTable) -> None:
    table.admit(make_sequence(2, [5]))
    with pytest.raises(ContractError, match="row 2"):
        table.admit(make_sequence(2, [5]))
    with pytest.raises(ContractError, match="row 8"):
        table.admit(make_sequence(8, [5]))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt": []}, "prompt_token_ids"),
        ({"prompt": [100]}, "prompt_token_ids"),
        ({"prompt": [1], "outputs": [100]}, "output_token_ids"),
        ({"prompt": [1], "outputs": [2, 3], "max_tokens": 2}, "max_tokens"),
        ({"prompt": [1], "computed": 1}, "num_computed_tokens"),
        ({"prompt": [1], "stop_token_ids": tuple(range(1025))}, "stop_token_ids"),
        ({"prompt": [1] * 40}, "prompt_token_ids"),
    ],
)
def test_a_bad_sequence_fails_its_row_alone_and_names_the_field(
    table: RowTable, changes: dict, field: str
) -> None:
    assert not table.admit(make_sequence(0, **({"max_tokens": 9} | changes)))
    assert table.state[0] == ENDED
    assert table.failures[0].field == field


def test_a_prompt_that_fills_the_context_is_refused_as_too_long(table: RowTable) -> None:
    table.admit(make_sequence(0, [1] * 40))
    assert table.failures[0].reason is FailureReason.CONTEXT_LENGTH_EXCEEDED
    assert table.admit(make_sequence(1, [1] * 39))


def test_an_unreadable_description_fails_its_row_with_that_error(table: RowTable) -> None:
    error = RequestError(FailureReason.INVALID_ARGUMENT, "odd bytes", field="prompt_token_ids")
    assert not table.admit(make_sequence(0, [1], error=error))
    assert table.failures[0] is error


def test_a_freed_row_forgets_its_failure_and_takes_another_sequence(table: RowTable) -> None:
    table.admit(make_sequence(0, []))
    table.free(0)
    assert table.state[0] == FREE
    assert not table.failures
    assert table.admit(make_sequence(0, [4]))


def test_reset_frees_every_row(table: RowTable) -> None:
    table.admit(make_sequence(0, [1]))
    table.admit(make_sequence(1, []))
    assert table.num_in_use() == 2
    table.reset()
    assert table.num_in_use() == 0
    assert not table.failures


def test_rows_take_any_number_of_stop_ids(table: RowTable) -> None:
    table.admit(make_sequence(0, [1], stop_token_ids=(3,), eos_token_ids=(2,)))
    table.admit(make_sequence(1, [1], stop_token_ids=tuple(range(20))))
    assert table.end_ids[0].tolist() == [2, 3] + [-1] * 18
    assert table.end_ids[1].tolist() == list(range(20))


def test_ignored_eos_ids_do_not_end_a_sequence() -> None:
    spec = SamplingSpec(eos_token_ids=(1,), stop_token_ids=(2,), ignore_eos=True)
    assert ending_ids(spec) == (2,)


def test_an_ending_id_counts_once_however_often_it_is_named() -> None:
    spec = SamplingSpec(eos_token_ids=(2, 3, 2), stop_token_ids=(5, 3, 5))
    assert ending_ids(spec) == (2, 3, 5)
    ignoring = SamplingSpec(eos_token_ids=(2, 3), stop_token_ids=(5, 3, 5), ignore_eos=True)
    assert ending_ids(ignoring) == (5, 3)


def test_room_is_what_the_nearest_length_leaves(table: RowTable) -> None:
    table.admit(make_sequence(0, [5] * 10, outputs=[6], max_tokens=4))
    table.admit(make_sequence(1, [5] * 38, max_tokens=9))
    assert table.room(np.array([0, 1])).tolist() == [3, 2]


def test_a_new_row_has_no_drafts_of_the_one_before(table: RowTable) -> None:
    table.num_drafts[2], table.num_accepted[2] = 3, 2
    table.admit(make_sequence(2, [5]))
    assert (table.num_drafts[2], table.num_accepted[2]) == (0, 0)


def test_tables_that_say_the_same_have_one_digest(table: RowTable) -> None:
    def fill(made: RowTable) -> RowTable:
        made.admit(make_sequence(0, [5, 6, 7], outputs=[8]))
        made.admit(make_sequence(3, [1] * 9))
        made.block_table[3, :2], made.num_blocks[3] = (4, 5), 2
        return made

    other = fill(RowTable(table.capacity))
    # What nobody reads: tokens and blocks behind the known ones, and those of free rows.
    other.tokens[0, 4:], other.block_table[3, 2:], other.tokens[1] = 77, 9, 5
    assert fill(table).digest() == other.digest()


@pytest.mark.parametrize(
    ("column", "place"),
    [
        ("state", 0),
        ("tokens", (0, 3)),
        ("num_computed", 0),
        ("num_accepted", 0),
        ("finish_code", 0),
        ("last_step", 0),
        ("block_table", (0, 1)),
        ("num_prompt", 0),
    ],
)
def test_any_difference_changes_the_digest(table: RowTable, column: str, place: Any) -> None:
    table.admit(make_sequence(0, [5, 6, 7], outputs=[8]))
    table.num_blocks[0] = 2
    before = table.digest()
    getattr(table, column)[place] += 1
    assert table.digest() != before


def test_drafts_are_part_of_the_digest(table: RowTable) -> None:
    table.admit(make_sequence(0, [5, 6, 7]))
    plain = table.digest()
    table.num_drafts[0], table.tokens[0, 3] = 1, 9
    first = table.digest()
    table.tokens[0, 3] = 10
    assert len({plain, first, table.digest()}) == 3
