"""Build submits, drive responses by hand, read the frames that come out."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from services.detokenizer.build import BuildContext
from services.detokenizer.messages import (
    ObjectKind,
    OutputSpec,
    SequenceFinished,
    SequenceSpec,
    TextSubmit,
    TokenSubmit,
    ToolChoice,
    ToolSpec,
)
from services.detokenizer.ports import SequenceListener
from shared.endings import AbortReason, FinishReason
from shared.errors import RequestError
from shared.sampling import SamplingSpec, SequenceStats, TokenLogprobs
from shared.wire import pack_ids
from tests.services.detokenizer.outputs import TOOLS
from tests.services.detokenizer.words import EOS, VOCABULARY

CONTEXT = BuildContext(
    vocabulary=VOCABULARY,
    fingerprint="glm-mesh-test",
    max_timeout_ms=60_000,
    make_call_id=lambda: "call_x",
)
SPECS = tuple(ToolSpec(name=name, parameters=schema) for name, schema in TOOLS.items())


def submit(num_sequences: int = 1, *, sampling: dict[str, Any] | None = None, **output: Any) -> Any:
    """A chat request; keywords are fields of the OutputSpec."""
    spec = OutputSpec(
        object_kind=ObjectKind.CHAT_COMPLETION, response_id="r", model="m", created_s=7
    )
    if "tools" in output:
        output.setdefault("tool_choice", ToolChoice.AUTO)
    return TextSubmit(
        request_id="r",
        sequences=tuple(
            SequenceSpec(index=i, prompt_token_ids=pack_ids([1, 2, 3]))
            for i in range(num_sequences)
        ),
        sampling=replace(SamplingSpec(eos_token_ids=(EOS,), max_tokens=100), **(sampling or {})),
        output=replace(spec, **output),
    )


def finished(
    reason: FinishReason = FinishReason.STOP, stop_token_id: int | None = None, **stats: int
) -> SequenceFinished:
    return SequenceFinished(
        reason=reason, stop_token_id=stop_token_id, stats=SequenceStats(**stats)
    )


def logprobs(count: int, top: Sequence[tuple[int, float]] = ()) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(
            logprob=-0.5,
            rank=1,
            top_token_ids=tuple(i for i, _ in top),
            top_logprobs=tuple(v for _, v in top),
        )
    ] * count


@dataclass
class FakeUpstream:
    """Remembers what it was told; the test plays the scheduler through `listener`."""

    refusal: RequestError | None = None
    submits: list[TokenSubmit] = field(default_factory=list)
    listeners: list[SequenceListener] = field(default_factory=list)
    aborts: list[tuple[int, AbortReason, int]] = field(default_factory=list)
    numbers: Any = field(default_factory=itertools.count)

    def submit(self, submit: TokenSubmit, listener: SequenceListener) -> list[int]:
        if self.refusal is not None:
            raise self.refusal
        self.submits.append(submit)
        self.listeners.append(listener)
        return [next(self.numbers) for _ in submit.sequences]

    def abort(self, stream_id: int, reason: AbortReason, num_tokens_kept: int = 0) -> None:
        self.aborts.append((stream_id, reason, num_tokens_kept))

    async def reset_cache(self) -> int:
        return 0


def events(data: bytes) -> list[Any]:
    """The events of a stream, [DONE] as text."""
    parts = data.decode().split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") and "\n" not in part for part in parts)
    bodies = [part.removeprefix("data: ") for part in parts]
    return [body if body == "[DONE]" else json.loads(body) for body in bodies]
