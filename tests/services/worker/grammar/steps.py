"""Whole steps with constraints on a model that says anything at all.

The decoder's logits are a hash of the context, so it is a random model; the drafter knows them
before they are masked.
"""

import json
from typing import Any

import torch
from torch import Tensor

from services.worker.grammar.compiler import GrammarCompiler
from services.worker.model_executor import ModelExecutor
from shared.constraint import Constraint, FormatKind, TextFormat
from shared.glm.tokenizer import GlmTokenizer
from tests.services.worker.fake_decoder import FakeDrafter
from tests.services.worker.plans import Live, MiniScheduler, make_capacity

POINT = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": -99, "maximum": 99},
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["round", "flat", None]},
    },
    "required": ["x", "name", "kind"],
    "additionalProperties": False,
}


def schema(value: Any, **more: Any) -> Constraint:
    given = TextFormat(
        kind=FormatKind.JSON_SCHEMA, text=json.dumps(value), has_whitespace=False, **more
    )
    return Constraint(format=given)


def choice(*texts: str) -> Constraint:
    return Constraint(format=TextFormat(kind=FormatKind.CHOICE, choices=texts))


def regex(text: str) -> Constraint:
    return Constraint(format=TextFormat(kind=FormatKind.REGEX, text=text))


class Bench:
    """Runs constrained sequences on a random model over the real vocabulary."""

    def __init__(self, compiler: GrammarCompiler, tokenizer: GlmTokenizer) -> None:
        self.compiler = compiler
        self.tokenizer = tokenizer
        self.control = tokenizer.vocabulary.control
        self.eos = (self.control.end_of_text, self.control.user, self.control.observation)

    def scheduler(
        self, *, drafts: int = 0, skill: float = 1.0, liked: str = "", chunk: int = 1000
    ) -> MiniScheduler:
        """A model that likes the tokens of a text, and its drafter with it."""
        executor = self._executor(drafts, skill)
        ids = sorted(set(self.tokenizer.encode(liked, allow_control=True)))
        decoder: Any = executor._decoder
        original = type(decoder).compute_draft_logits

        def favour(logits: Tensor) -> None:
            logits[:, ids] += 6.0

        def drafted(hidden: Tensor) -> Tensor:
            logits = original(decoder, hidden)
            favour(logits)
            return logits

        decoder.change = favour
        decoder.compute_draft_logits = drafted
        return MiniScheduler(executor, chunk=chunk)

    def _executor(self, drafts: int, skill: float) -> ModelExecutor[Tensor]:
        size = len(self.tokenizer.vocabulary)
        limits = make_capacity(
            vocab_size=size,
            num_blocks=1000,
            max_model_len=400,
            num_rows=16,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            num_speculative_tokens=drafts,
        )
        decoder = FakeDrafter(limits, vocab_size=size, skill=skill)
        return ModelExecutor(
            decoder,
            torch.full((2 * limits.num_blocks * limits.block_size,), -1, dtype=torch.int64),
            limits,
            num_known_ids=size,
            device=torch.device("cpu"),
            row_multiple=1,
            drafter=decoder,
            grammars=self.compiler,
        )

    def limit(self, name: str, text: Any) -> Any:
        """A number as it is, a text as the limit of that name over its ids."""
        if not isinstance(text, str):
            return text
        ids = self.tokenizer.encode(text, allow_control=True)
        return tuple((i,) for i in ids) if name == "bad_words" else tuple(ids)

    def text(self, live: Live) -> str:
        return self.tokenizer.vocabulary.decode(t for t in live.outputs if t not in self.eos)

    def add(self, scheduler: MiniScheduler, constraint: Constraint | None, **more: Any) -> Live:
        given_ = {"temperature": 1.0, "seed": 1, "max_tokens": 200} | more
        return scheduler.add([1, 2, 3], eos_token_ids=self.eos, constraint=constraint, **given_)


def is_point(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["x", "name", "kind"]
        and -99 <= value["x"] <= 99
        and len(value["name"]) <= 6
        and value["kind"] in ("round", "flat", None)
    )
