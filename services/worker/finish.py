"""Where a run of new tokens ends a sequence.

The order of tests is fixed: end-of-sequence id, stop id, max_tokens, max_model_len. Token ids end a
sequence only once `min_tokens` tokens came before them; lengths end it always.
"""

import numpy as np
from numpy.typing import NDArray

from services.worker.plan import FinishCode, Ints
from services.worker.rows import RowTable

# Plain numbers: looking up a member of an enum costs more than comparing 256 rows.
_GOES_ON, _EOS, _STOP_TOKEN, _MAX_TOKENS, _MAX_MODEL_LEN = map(int, FinishCode)


def cut_runs(table: RowTable, rows: Ints, runs: Ints, lengths: Ints) -> tuple[Ints, Ints]:
    """Cut each run after the token that ends its sequence.

    Args:
        table: Facts of the rows, from before the run.
        rows: [S] row ids.
        runs: [S, N] new tokens; entries past a run's length are ignored.
        lengths: [S] tokens in each run, at least 1.

    Returns:
        Tokens kept of each run and the finish code of each row.
    """
    width = runs.shape[1]
    num_before = (table.num_tokens[rows] - table.num_prompt[rows])[:, None] + np.arange(width)
    codes = _length_codes(table, rows, num_before)
    for column, id_codes in _matches(table, rows, runs):
        is_free_to_stop = num_before[:, column] >= table.min_tokens[rows]
        hit = (id_codes != _GOES_ON) & is_free_to_stop
        codes[hit, column] = id_codes[hit]
    if width == 1:
        return lengths, codes[:, 0]
    is_end = (codes != _GOES_ON) & (np.arange(width) < lengths[:, None])
    has_end = is_end.any(axis=1)
    first = is_end.argmax(axis=1)
    kept = np.where(has_end, first + 1, lengths)
    return kept, np.where(has_end, codes[np.arange(len(rows)), first], _GOES_ON)


def _length_codes(table: RowTable, rows: Ints, num_before: Ints) -> Ints:
    max_model_len = table.capacity.max_model_len
    num_after = num_before + 1
    is_full = num_after + table.num_prompt[rows][:, None] >= max_model_len
    codes = np.where(is_full, _MAX_MODEL_LEN, _GOES_ON).astype(np.int64)
    codes[num_after >= table.max_tokens[rows][:, None]] = _MAX_TOKENS
    return codes


def _matches(table: RowTable, rows: Ints, runs: Ints) -> list[tuple[int, Ints]]:
    """Per column of the runs: the code of the ending id that stands there, if one does."""
    end_ids = table.end_ids[rows]
    num_eos = table.num_eos[rows]
    found = []
    for column in range(runs.shape[1]):
        is_match: NDArray[np.bool_] = end_ids == runs[:, column, None]
        if not is_match.any():
            continue
        codes = np.where(is_match.argmax(axis=1) < num_eos, _EOS, _STOP_TOKEN)
        found.append((column, np.where(is_match.any(axis=1), codes, _GOES_ON)))
    return found
