"""What a constraint costs: checking and compiling it once, and a mask for every token.

    python -m benchmarks.structured_output [--rows 64] [--tokens 100]

A vocabulary of GLM-5.2's size: that of glm-nano and made-up words. Rows write random texts that
their grammar allows, so every state of it is as likely as any other; that is harder than what a
model writes. Times are of the one thread that makes all masks, best of the rounds; one line per
constraint.
"""

import argparse
import asyncio
import itertools
import json
import random
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from services.worker.grammar.compiler import GrammarCompiler
from services.worker.grammar.desk import GrammarDesk
from services.worker.grammar.filling import MaskFiller
from services.worker.grammar.masking import allow_only
from services.worker.grammar.rows import Masks, RowConstraints
from services.worker.grammar.vocabulary import EngineVocabulary
from services.worker.plan import NewSequence
from shared.constraint import (
    CalledTool,
    CallRules,
    Constraint,
    FormatKind,
    PrepareOrder,
    TextFormat,
)
from shared.glm.tokenizer import GlmTokenizer
from shared.sampling import SamplingSpec

VOCAB_SIZE: Final = 154_820
_NANO: Final = Path(__file__).parents[1] / "models" / "glm-nano"
_PERSON: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
_WIDE: Final = {
    "type": "object",
    "properties": {f"field_{i}": {"anyOf": [_PERSON, {"type": "null"}]} for i in range(40)},
    "additionalProperties": False,
}
_NAMES: Final = "^([A-Z][a-z]{2,12} ?){2,6}$"


def main(argv: list[str] | None = None) -> int:
    """Measure each constraint."""
    parser = argparse.ArgumentParser(description="cost of masks")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    started = time.perf_counter()
    vocabulary = EngineVocabulary(tokenizer)
    load_s = time.perf_counter() - started
    for name, constraint in _constraints().items():
        compiler = GrammarCompiler(lambda: vocabulary)
        started = time.thread_time()
        compiler.compile(constraint)
        compile_ms = 1000 * (time.thread_time() - started)
        rounds = [_run(compiler, constraint, args.rows, args.tokens) for _ in range(args.rounds)]
        mask_us, apply_us = (min(each) for each in zip(*rounds, strict=True))
        line = {
            "claim": "structured_output",
            "constraint": name,
            "vocab_size": vocabulary.size,
            "rows": args.rows,
            "load_s": round(load_s, 2),
            "prepare_ms": round(_prepare_ms(constraint), 1),
            "compile_ms": round(compile_ms, 2),
            "mask_us_per_token": round(mask_us, 1),
            "apply_us_per_token": round(apply_us, 1),
        }
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
    return 0


def make_tokenizer() -> GlmTokenizer:
    """glm-nano's tokenizer with words made up until it has as many tokens as GLM-5.2's."""
    source: dict[str, Any] = json.loads((_NANO / "tokenizer.json").read_text("utf-8"))
    vocab: dict[str, int] = source["model"]["vocab"]
    first_free = 1 + max([*vocab.values(), *(t["id"] for t in source["added_tokens"])])
    free = itertools.count(first_free)
    syllables = [c + v for c in "bcdfghjklmnprstvwz" for v in ("a", "e", "i", "o", "u", "ar", "en")]
    for count in itertools.count(1):
        for parts in itertools.product(syllables, repeat=count):
            word = "".join(parts)
            for text in (word, "Ġ" + word, word.capitalize()):
                if len(vocab) >= VOCAB_SIZE:
                    return GlmTokenizer(source)
                if text not in vocab:
                    vocab[text] = next(free)
    raise AssertionError("words do not end")


def _constraints() -> dict[str, Constraint]:
    def schema(value: Any) -> Constraint:  # noqa: ANN401  (any JSON value)
        return Constraint(format=TextFormat(kind=FormatKind.JSON_SCHEMA, text=json.dumps(value)))

    tools = tuple(
        CalledTool(name=f"tool_{i}", parameters_json=json.dumps(_PERSON), is_strict=True)
        for i in range(16)
    )
    return {
        "small schema": schema(_PERSON),
        "40 objects": schema(_WIDE),
        "any object": Constraint(format=TextFormat(kind=FormatKind.JSON_OBJECT)),
        "heavy words": schema({"type": "array", "items": {"type": "string", "pattern": _NAMES}}),
        "16 tools": Constraint(calls=CallRules(tools=tools, is_required=True)),
    }


def _prepare_ms(constraint: Constraint) -> float:
    """A check in the child and compiling, as a request waits for it; with glm-nano's tokenizer."""

    async def prepare() -> float:
        desk = GrammarDesk.of_checkpoint(_NANO)
        warm = Constraint(format=TextFormat(kind=FormatKind.CHOICE, choices=("a",)))
        try:
            await desk.prepare(PrepareOrder(constraint=warm, request_id="warm"))  # starts the child
            order = PrepareOrder(constraint=constraint, request_id="bench")
            return await desk.prepare(order) / 1000
        finally:
            await desk.close()

    return asyncio.run(prepare())


def _run(
    compiler: GrammarCompiler, constraint: Constraint, num_rows: int, num_tokens: int
) -> tuple[float, float]:
    """Microseconds per token to make masks, and to apply them."""
    eos = compiler.vocabulary.control.end_of_text
    constraints = RowConstraints(num_rows, compiler, filler=MaskFiller(num_threads=1))
    rows, choose = np.arange(num_rows), random.Random(0)
    for row in rows.tolist():
        constraints.admit(_sequence(row, constraint, eos))
    logits = torch.zeros(num_rows, compiler.vocabulary.size)
    mask_ns = apply_ns = count = 0
    for _ in range(num_tokens):
        started = time.thread_time_ns()
        masks = constraints.masks(rows, None)
        made = time.thread_time_ns()
        assert masks is not None
        allow_only(logits, masks.places, masks.words)
        mask_ns, apply_ns = mask_ns + made - started, apply_ns + time.thread_time_ns() - made
        count += num_rows
        tokens = _choose(masks, choose)
        started = time.thread_time_ns()
        constraints.note(rows, tokens)
        mask_ns += time.thread_time_ns() - started
        for row in rows[tokens == eos].tolist():
            constraints.free(row)
            constraints.admit(_sequence(row, constraint, eos))
        logits.zero_()
    return mask_ns / count / 1000, apply_ns / count / 1000


def _choose(masks: Masks, choose: random.Random) -> "np.ndarray":
    """Any allowed token of each row."""
    bits = np.unpackbits(masks.words.numpy().view(np.uint8), axis=1, bitorder="little")
    found = [np.flatnonzero(row) for row in bits]
    return np.array([ids[choose.randrange(len(ids))] for ids in found])


def _sequence(row: int, constraint: Constraint, eos: int) -> NewSequence:
    return NewSequence(
        row=row,
        request_id="",
        prompt_token_ids=np.ones(1, np.uint32),
        output_token_ids=np.empty(0, np.uint32),
        num_computed_tokens=0,
        sampling=SamplingSpec(constraint=constraint, eos_token_ids=(eos,)),
    )


if __name__ == "__main__":
    sys.exit(main())
