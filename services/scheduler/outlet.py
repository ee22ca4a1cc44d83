"""Where the tokens and ends of one client go: the columns that the next message will carry.

An outlet belongs to one `Connect` stream or one `Generate` call. It knows live sequences by
stream_id only; the scheduler core fills it and the engine empties it after every event.
"""

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING

from services.scheduler.messages import Delivery, SequenceEnd, TokenColumns

if TYPE_CHECKING:
    from services.scheduler.sequence import Sequence


class Outlet:
    """Columns under construction, and the live sequences by stream_id."""

    __slots__ = ("columns", "ends", "is_closed", "preparing", "sequences")

    def __init__(self) -> None:
        """An open outlet without sequences."""
        self.sequences: dict[int, Sequence] = {}
        # Sequences that are not live yet, with their request (`preparing.py`).
        self.preparing: dict[int, str] = {}
        self.is_closed = False
        self.ends: list[SequenceEnd] = []
        self.columns = _empty_columns()

    def appenders(self) -> tuple[Callable[[int], None], ...]:
        """Append to stream_ids, num_previous_tokens, num_tokens, token_ids; until `take`."""
        columns = self.columns
        return (
            columns.stream_ids.append,
            columns.num_previous_tokens.append,
            columns.num_tokens.append,
            columns.token_ids.append,
        )

    def take(self) -> Delivery | None:
        """What gathered since the last call, None when nothing did."""
        tokens, ends = None, self.ends
        if self.columns.stream_ids or self.columns.prompt_logprobs:
            tokens, self.columns = self.columns, _empty_columns()
        if tokens is None and not ends:
            return None
        self.ends = []
        return Delivery(tokens=tokens, ends=ends)


def _empty_columns() -> TokenColumns:
    return TokenColumns(
        stream_ids=[], num_previous_tokens=[], num_tokens=[], token_ids=array("I"), logprobs=[]
    )
