"""`python -P -m services.worker.grammar.child MODEL`: checks constraints from standard input.

Asks and answers are a length (4 bytes, little-endian) and as many bytes: a JSON constraint in, a
JSON verdict out, and before it an empty answer now and then while the check gets on. Each check has
a process of its own, forked from this one, whose processor time and memory the kernel bounds:
beyond them it dies, and the tokenizer is still here for the next one.
"""

import gc
import os
import resource
import select
import signal
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, NoReturn

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
_BEAT_S: Final = 0.25
_MAX_REASON_CHARS: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a constraint can be used."""

    message: str = ""
    """Why not; empty when it can."""
    field: str | None = None
    exit_code: int = 0
    """Of the check's process if it ended without one, negative for a signal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Of one check."""

    cpu_s: float
    memory_bytes: int


def serve(vocabulary: EngineVocabulary, source: BinaryIO, target: BinaryIO, bounds: Bounds) -> None:
    """Answer until the source ends."""
    while head := source.read(LENGTH.size):
        ask = source.read(*LENGTH.unpack(head))
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            _check_and_exit(vocabulary, ask, writing, bounds)
        os.close(writing)
        with open(reading, "rb") as pipe:
            _beat_until_readable(pipe, pid, target)
            answer = pipe.read()
        _, status = os.waitpid(pid, 0)
        if status or not answer:
            answer = msgspec.json.encode(Verdict(exit_code=os.waitstatus_to_exitcode(status)))
        target.write(LENGTH.pack(len(answer)) + answer)
        target.flush()


def _check_and_exit(
    vocabulary: EngineVocabulary, ask: bytes, writing: int, bounds: Bounds
) -> NoReturn:
    """What the process of one check does."""
    try:
        die_with_parent()
        bound_memory(bounds.memory_bytes)
        os.write(writing, msgspec.json.encode(verdict_of(vocabulary, ask, bounds.cpu_s)))
    except MemoryError:
        os.abort()  # as the engine ends without any
    except BaseException:  # noqa: BLE001  # nothing may go on behind this process's one task
        os._exit(1)
    os._exit(0)


def verdict_of(vocabulary: EngineVocabulary, ask: bytes, cpu_s: float) -> Verdict:
    """The verdict about one constraint; beyond its time the process dies."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        check(msgspec.json.decode(ask, type=Constraint), vocabulary)
        return Verdict()
    except RequestError as error:
        return Verdict(message=error.message, field=error.field)
    except MemoryError:
        return Verdict(message="constraint: it takes too much memory", field="constraint")
    except BaseException as error:  # noqa: BLE001  # a panic of the engine is no Exception
        _log.exception("a constraint could not be read")
        text = f"constraint: it cannot be read ({type(error).__name__}: {error})"
        return Verdict(message=text[:_MAX_REASON_CHARS], field="constraint")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _beat_until_readable(pipe: BinaryIO, pid: int, target: BinaryIO) -> None:
    """Wait for a check; say that it gets on as long as it does, however slowly."""
    spent = 0
    while not select.select([pipe], [], [], _BEAT_S)[0]:
        now = _ticks(pid)
        if now > spent:
            spent = now
            target.write(LENGTH.pack(0))
            target.flush()


def _ticks(pid: int) -> int:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])  # utime and stime, proc(5)


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
    gc.freeze()  # pages that stay as they are are shared with the checks
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.stdout.buffer.write(LENGTH.pack(0))
    sys.stdout.buffer.flush()
    bounds = Bounds(cpu_s=float(cpu_s), memory_bytes=int(memory_bytes))
    serve(vocabulary, sys.stdin.buffer, sys.stdout.buffer, bounds)


if __name__ == "__main__":
    main(sys.argv[1:])
