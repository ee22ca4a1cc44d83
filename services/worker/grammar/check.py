"""Tries a constraint out before any row has it: compiles it, and walks some way into it.

Runs in a process that may be killed (`child`): what costs too much here costs nobody anything.
"""

import random
import time
from typing import Final

import numpy as np

from services.worker.grammar.compiler import CompiledGrammar, compile_anew, reason_of
from services.worker.grammar.vocabulary import EngineVocabulary
from services.worker.grammar.writer import refused
from shared.constraint import Constraint

_NUM_STEPS: Final = 24
# A usual mask takes 0.01 to 0.2 ms; a step of a model on an NPU some 30 ms for all rows.
_MAX_MEAN_MASK_MS: Final = 20.0


def check(constraint: Constraint, vocabulary: EngineVocabulary) -> None:
    """Refuse what has no grammar or costs too much.

    Raises:
        RequestError: Why.
    """
    grammar = compile_anew(constraint, vocabulary)
    cost_ms = _walk(grammar)
    if cost_ms > _MAX_MEAN_MASK_MS:
        raise refused("constraint", f"a token of it takes {cost_ms:.0f} ms to decide, too long")


def _walk(grammar: CompiledGrammar) -> float:
    """Milliseconds of processor time per mask along a path of allowed tokens."""
    matcher = grammar.matcher()
    choose = random.Random(0)  # any path will do, and always the same one
    eos = grammar.vocabulary.control.end_of_text
    started = time.process_time()
    num_steps = 0
    while num_steps < _NUM_STEPS:
        num_steps += 1
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        ids = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        ids = ids[ids != eos]
        if len(ids) and not matcher.is_error():
            matcher.consume_token(int(ids[choose.randrange(len(ids))]))
        if matcher.is_error():
            raise refused("constraint", reason_of(matcher))
        if not len(ids) or matcher.is_stopped():
            break
    return 1000 * (time.process_time() - started) / num_steps
