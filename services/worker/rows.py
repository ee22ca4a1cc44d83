"""The rows of a worker: everything it remembers about the sequences between two plans.

Facts are columns (numpy arrays over all rows), so that a step reads and writes the rows it names
with a few vector operations. A row is FREE, RUNNING, or ENDED: finished or failed, but not freed by
the scheduler yet. An ended row that a plan still names is padding.

Invariants of a RUNNING row: num_computed < num_tokens < max_model_len, tokens[:num_tokens] is the
prompt followed by the outputs, the num_drafts tokens behind them are guesses at what comes next,
block_table[:num_blocks] are its blocks in order.
"""

import hashlib

import numpy as np

from services.worker.plan import Capacity, ContractError, FinishCode, Ints, NewSequence
from shared.errors import FailureReason, RequestError
from shared.sampling import SamplingSpec

FREE, RUNNING, ENDED = 0, 1, 2

# No sequence has a negative token, so padding of end_ids never matches.
_NO_TOKEN = -1
_INITIAL_END_IDS = 8
# The column of ending ids is as wide as the longest list of any row.
_MAX_END_IDS = 1024


class RowTable:
    """Columns over all rows. One thread uses it."""

    def __init__(self, capacity: Capacity) -> None:
        """Reserve all columns; pages of `tokens` that no sequence touched take no memory."""
        self.capacity = capacity
        size = capacity.num_rows
        self.state = np.zeros(size, np.int8)
        self.tokens = np.zeros((size, capacity.max_model_len), np.int32)
        self.num_prompt = np.zeros(size, np.int64)
        self.num_tokens = np.zeros(size, np.int64)
        self.num_computed = np.zeros(size, np.int64)
        self.last_computed = np.zeros(size, np.int64)
        """num_computed before the last step that named the row."""
        self.last_step = np.zeros(size, np.int64)
        """The last step that named the row; 0 for none."""
        self.num_drafts = np.zeros(size, np.int64)
        self.num_accepted = np.zeros(size, np.int64)
        """Drafts that the last step kept."""
        self.block_table = np.zeros((size, capacity.max_blocks_per_row), np.int32)
        self.num_blocks = np.zeros(size, np.int64)
        self.min_tokens = np.zeros(size, np.int64)
        self.max_tokens = np.zeros(size, np.int64)
        self.finish_code = np.zeros(size, np.int64)
        self.num_logprobs = np.full(size, -1, np.int64)
        """Alternatives asked for; -1 for no logprobs at all."""
        self.end_ids = np.full((size, _INITIAL_END_IDS), _NO_TOKEN, np.int64)
        self.num_eos = np.zeros(size, np.int64)
        """The first `num_eos` of end_ids are end-of-sequence ids, the others stop ids."""
        self.failures: dict[int, RequestError] = {}

    def reset(self) -> None:
        """Free every row."""
        self.state[:] = FREE
        self.failures.clear()

    def num_in_use(self) -> int:
        """Rows that are not free."""
        return int(np.count_nonzero(self.state))

    def digest(self) -> int:
        """64 bits that differ, almost surely, between tables that do not say the same."""
        sums = hashlib.blake2b(digest_size=8)
        sums.update(self.state.tobytes())
        for row in self.state.nonzero()[0].tolist():
            num_tokens, num_drafts = int(self.num_tokens[row]), int(self.num_drafts[row])
            facts = (
                self.num_prompt[row],
                num_tokens,
                self.num_computed[row],
                self.last_step[row],
                num_drafts,
                self.num_accepted[row],
                self.num_blocks[row],
                self.finish_code[row],
            )
            sums.update(np.array(facts, np.int64).tobytes())
            if self.state[row] == RUNNING:
                sums.update(self.tokens[row, : num_tokens + num_drafts].tobytes())
                sums.update(self.block_table[row, : self.num_blocks[row]].tobytes())
        return int.from_bytes(sums.digest(), "little", signed=True)

    def admit(self, new: NewSequence) -> bool:
        """Put a sequence into its row.

        Returns:
            Whether it can run; if not, its row is ENDED with the reason and the others go on.

        Raises:
            ContractError: The row does not exist or is in use.
        """
        if not 0 <= new.row < self.capacity.num_rows:
            raise ContractError(f"row {new.row} of a new sequence is not below num_rows")
        if self.state[new.row] != FREE:
            raise ContractError(f"row {new.row} of a new sequence is in use")
        self.last_step[new.row] = 0
        self.num_drafts[new.row] = self.num_accepted[new.row] = 0
        self.num_blocks[new.row] = 0
        self.finish_code[new.row] = FinishCode.GOES_ON
        self.num_logprobs[new.row] = -1
        try:
            self._check(new)
        except RequestError as error:
            self.fail(new.row, error)
            return False
        self._describe(new)
        return True

    def room(self, rows: Ints) -> Ints:
        """Tokens that each row may still get before a length ends it; at least 1 while it runs."""
        most = self.num_prompt[rows] + self.max_tokens[rows]
        room: Ints = np.minimum(most, self.capacity.max_model_len) - self.num_tokens[rows]
        return room

    def covered(self, rows: Ints) -> Ints:
        """Positions that the blocks of each row hold."""
        return self.num_blocks[rows] * self.capacity.block_size

    def fail(self, row: int, error: RequestError) -> None:
        """End one row badly."""
        self.state[row] = ENDED
        self.failures[row] = error

    def free(self, row: int) -> None:
        """Give a row back."""
        assert self.state[row] != FREE, row
        self.state[row] = FREE
        self.failures.pop(row, None)

    def _check(self, new: NewSequence) -> None:
        if new.error is not None:
            raise new.error
        limit = self.capacity.max_model_len
        num_prompt, num_output = len(new.prompt_token_ids), len(new.output_token_ids)
        if num_prompt == 0:
            raise _refused("prompt_token_ids", "the prompt is empty")
        if num_prompt + num_output >= limit:
            raise RequestError(
                FailureReason.CONTEXT_LENGTH_EXCEEDED,
                f"{num_prompt + num_output} tokens leave no room below max_model_len {limit}",
                field="prompt_token_ids",
            )
        for name in ("prompt_token_ids", "output_token_ids"):
            ids = getattr(new, name)
            if len(ids) and int(ids.max()) >= self.capacity.vocab_size:
                raise _refused(name, f"id {ids.max()} is not below {self.capacity.vocab_size}")
        if len(ending_ids(new.sampling)) > _MAX_END_IDS:
            raise _refused("stop_token_ids", f"more than {_MAX_END_IDS} ids end the sequence")
        if num_output >= new.sampling.max_tokens:
            raise _refused("max_tokens", "the sequence has max_tokens outputs already")
        if new.num_computed_tokens >= num_prompt + num_output:
            raise _refused("num_computed_tokens", "no token is left to compute")

    def _describe(self, new: NewSequence) -> None:
        row, num_prompt = new.row, len(new.prompt_token_ids)
        num_tokens = num_prompt + len(new.output_token_ids)
        self.tokens[row, :num_prompt] = new.prompt_token_ids
        self.tokens[row, num_prompt:num_tokens] = new.output_token_ids
        self.num_prompt[row] = num_prompt
        self.num_tokens[row] = num_tokens
        self.num_computed[row] = self.last_computed[row] = new.num_computed_tokens
        # Under a constraint an end comes early only where it is all that is left: the bound yields.
        is_free = new.sampling.constraint is None
        self.min_tokens[row] = new.sampling.min_tokens if is_free else 0
        self.max_tokens[row] = new.sampling.max_tokens
        if new.sampling.num_logprobs is not None:
            self.num_logprobs[row] = new.sampling.num_logprobs
        self._set_end_ids(row, new.sampling)
        self.state[row] = RUNNING

    def _set_end_ids(self, row: int, spec: SamplingSpec) -> None:
        ids = ending_ids(spec)
        missing = len(ids) - self.end_ids.shape[1]
        if missing > 0:
            self.end_ids = np.pad(self.end_ids, ((0, 0), (0, missing)), constant_values=_NO_TOKEN)
        self.end_ids[row] = _NO_TOKEN
        self.end_ids[row, : len(ids)] = ids
        self.num_eos[row] = 0 if spec.ignore_eos else len(set(spec.eos_token_ids))


def ending_ids(spec: SamplingSpec) -> tuple[int, ...]:
    """Ids that end a sequence, each once: end-of-sequence ids unless ignored, then stop ids."""
    eos = () if spec.ignore_eos else tuple(dict.fromkeys(spec.eos_token_ids))
    return eos + tuple(i for i in dict.fromkeys(spec.stop_token_ids) if i not in eos)


def _refused(field: str, message: str) -> RequestError:
    return RequestError(FailureReason.INVALID_ARGUMENT, f"{field}: {message}", field=field)
