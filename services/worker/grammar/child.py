"""`python -P -m services.worker.grammar.child MODEL`: checks constraints from standard input.

Asks and answers are a length (4 bytes, little-endian) and as many bytes: a JSON constraint in, a
JSON verdict out. The processor time of one check and all memory are bounded by the kernel: beyond
them the process dies, and whoever asked knows why.
"""

import os
import resource
import signal
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from services.worker.grammar.check import check
from services.worker.grammar.vocabulary import EngineVocabulary
from shared.constraint import Constraint
from shared.errors import RequestError
from shared.glm.tokenizer import GlmTokenizer
from shared.log import get_logger
from shared.parent import die_with_parent

_log = get_logger(__name__)

LENGTH: Final = struct.Struct("<I")
_NICENESS: Final = 5
_MAX_REASON_CHARS: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a constraint can be used."""

    message: str = ""
    """Why not; empty when it can."""
    field: str | None = None


def serve(vocabulary: EngineVocabulary, source: BinaryIO, target: BinaryIO, cpu_s: float) -> None:
    """Answer until the source ends."""
    while head := source.read(LENGTH.size):
        constraint = msgspec.json.decode(source.read(*LENGTH.unpack(head)), type=Constraint)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        try:
            check(constraint, vocabulary)
            verdict = Verdict()
        except RequestError as error:
            verdict = Verdict(message=error.message, field=error.field)
        except MemoryError:
            verdict = Verdict(message="constraint: it takes too much memory", field="constraint")
        except BaseException as error:  # noqa: BLE001  # a panic of the engine is no Exception
            _log.exception("a constraint could not be read")
            text = f"constraint: it cannot be read ({type(error).__name__}: {error})"
            verdict = Verdict(message=text[:_MAX_REASON_CHARS], field="constraint")
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        answer = msgspec.json.encode(verdict)
        target.write(LENGTH.pack(len(answer)) + answer)
        target.flush()


def bound_memory(more_bytes: int) -> None:
    """Let the process grow by so much and no further."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    limit = pages * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main(arguments: list[str]) -> None:
    """Read the tokenizer, say so with an empty answer, serve."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    model, cpu_s, memory_bytes = arguments
    os.nice(_NICENESS)
    vocabulary = EngineVocabulary(GlmTokenizer.load(Path(model)))
    bound_memory(int(memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.stdout.buffer.write(LENGTH.pack(0))
    sys.stdout.buffer.flush()
    serve(vocabulary, sys.stdin.buffer, sys.stdout.buffer, float(cpu_s))


if __name__ == "__main__":
    main(sys.argv[1:])
