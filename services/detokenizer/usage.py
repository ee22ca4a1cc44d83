"""Token counts of a response, as OpenAI shows them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.detokenizer.choice import Choice
from shared.sampling import SequenceStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Counts over all choices; a prompt that several choices share counts once."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    # None where nothing tells reasoning apart.
    num_reasoning_tokens: int | None
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0

    def before_output(self) -> "Usage":
        """The usage when nothing had been generated."""
        none = None if self.num_reasoning_tokens is None else 0
        return replace(
            self,
            num_output_tokens=0,
            num_reasoning_tokens=none,
            num_drafted_tokens=0,
            num_accepted_tokens=0,
        )

    def to_json(self) -> bytes:
        """The usage object."""
        total = self.num_prompt_tokens + self.num_output_tokens
        details = self._details()
        if details:
            details = f',"completion_tokens_details":{{{details}}}'
        return (
            f'{{"prompt_tokens":{self.num_prompt_tokens}'
            f',"completion_tokens":{self.num_output_tokens},"total_tokens":{total}'
            f',"prompt_tokens_details":{{"cached_tokens":{self.num_cached_tokens}}}{details}}}'
        ).encode()

    def _details(self) -> str:
        """Members of completion_tokens_details; those of drafts where there were any."""
        members = {}
        if self.num_reasoning_tokens is not None:
            members["reasoning_tokens"] = self.num_reasoning_tokens
        if self.num_drafted_tokens:
            members["accepted_prediction_tokens"] = self.num_accepted_tokens
            rejected = self.num_drafted_tokens - self.num_accepted_tokens
            members["rejected_prediction_tokens"] = rejected
        return ",".join(f'"{name}":{count}' for name, count in members.items())


def count_usage(
    choices: Sequence[Choice], *, num_choices_per_prompt: int, has_reasoning: bool
) -> Usage:
    """Usage so far; the first choice of a prompt stands for the prompt."""
    firsts = choices[:: max(1, num_choices_per_prompt)]
    return Usage(
        num_prompt_tokens=sum(choice.num_prompt_tokens for choice in firsts),
        num_cached_tokens=sum(choice.stats.num_cached_tokens for choice in firsts),
        num_output_tokens=sum(choice.num_tokens for choice in choices),
        num_reasoning_tokens=(
            sum(choice.text.num_reasoning_tokens for choice in choices) if has_reasoning else None
        ),
        num_drafted_tokens=sum(choice.num_drafted_tokens for choice in choices),
        num_accepted_tokens=sum(choice.num_accepted_tokens for choice in choices),
    )


def total_stats(choices: Sequence[Choice], usage: Usage) -> SequenceStats:
    """Counts over all sequences; times of the slowest."""
    stats = [choice.stats for choice in choices]
    return SequenceStats(
        num_prompt_tokens=usage.num_prompt_tokens,
        num_cached_tokens=usage.num_cached_tokens,
        num_output_tokens=usage.num_output_tokens,
        queue_us=max(one.queue_us for one in stats),
        prefill_us=max(one.prefill_us for one in stats),
        decode_us=max(one.decode_us for one in stats),
        num_preemptions=sum(one.num_preemptions for one in stats),
        num_steps=max(one.num_steps for one in stats),
        num_drafted_tokens=usage.num_drafted_tokens,
        num_accepted_tokens=usage.num_accepted_tokens,
    )
