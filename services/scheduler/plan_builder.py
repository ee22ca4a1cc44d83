"""A plan under construction: its columns grow in step, one entry per row."""

from array import array

from services.scheduler.plan import NewSequence, StepPlan
from services.scheduler.sequence import Sequence


class PlanBuilder:
    """The columns of a plan under construction."""

    __slots__ = (
        "computed",
        "new_blocks",
        "new_sequences",
        "num_new_blocks",
        "num_prompt_tokens",
        "rows",
        "scheduled",
        "sequences",
        "step",
    )

    def __init__(self, step: int, decodes: list[Sequence], num_decode_tokens: int) -> None:
        """One token and its drafts for each of `decodes`, none of which needs a block."""
        self.step = step
        self.sequences = decodes
        self.rows = [s.row for s in decodes]
        self.computed = [s.num_planned_tokens for s in decodes]
        self.scheduled = [num_decode_tokens] * len(decodes)
        self.num_new_blocks = [0] * len(decodes)
        self.new_blocks = array("I")
        self.new_sequences: list[NewSequence] = []
        self.num_prompt_tokens = 0
        for sequence in decodes:
            sequence.num_planned_tokens += 1
            sequence.num_steps += 1
            sequence.last_step = step

    def add(self, sequence: Sequence, count: int, num_drafts: int = 0) -> None:
        """Tokens of one further sequence, and the blocks that the worker does not know."""
        new_blocks = sequence.blocks[sequence.num_sent_blocks :]
        sequence.num_sent_blocks = len(sequence.blocks)
        self.sequences.append(sequence)
        self.rows.append(sequence.row)
        self.computed.append(sequence.num_planned_tokens)
        self.scheduled.append(count + num_drafts)
        self.num_new_blocks.append(len(new_blocks))
        self.new_blocks.extend(new_blocks)
        sequence.num_planned_tokens += count
        sequence.num_steps += 1
        sequence.last_step = self.step

    def describe(self, sequence: Sequence) -> None:
        """Tell the worker of a sequence that takes a row, before its first tokens are added."""
        self.new_sequences.append(
            NewSequence(
                row=sequence.row,
                request_id=sequence.request.request_id,
                prompt_token_ids=sequence.prompt_token_ids,
                output_token_ids=sequence.output_token_ids[:],
                num_computed_tokens=sequence.num_planned_tokens,
                sampling=sequence.sampling,
                replay=sequence.replay,
                traceparent=sequence.request.traceparent,
            )
        )

    def build(self, freed_rows: list[int]) -> StepPlan:
        """The plan."""
        return StepPlan(
            step=self.step,
            rows=self.rows,
            num_scheduled_tokens=self.scheduled,
            num_computed_tokens=self.computed,
            num_new_blocks=self.num_new_blocks,
            new_blocks=self.new_blocks,
            new_sequences=self.new_sequences,
            freed_rows=freed_rows,
        )
