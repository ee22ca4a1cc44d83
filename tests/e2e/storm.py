"""A crowd as a public server meets it: most want an answer, some leave, stall or send nonsense."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

from tests.e2e.asks import ASKS, CHAT, Ask, Said, said
from tests.e2e.faults import FAULTS, Fault
from tests.e2e.mesh import Mesh
from tests.e2e.visitors import LAST_CHUNK, Place, request

HANG_UPS: Final = 0.10
STALLS: Final = 0.10
FAULTY: Final = 0.05
# More than what the sockets of both sides and the gateway take without anybody reading.
_TOKEN_FIELDS: Final = {"logprobs": True, "top_logprobs": 20, "ignore_eos": True, "n": 2}
_STALL_TOKENS: Final = 200
_LIMIT_S: Final = 240
PHASES: Final = (
    *("in the head", "in the body", "before the answer", "before a whole answer"),
    *("in the answer's head", "in the stream", "at the end", "at the end of a whole answer"),
)


@dataclass(slots=True)
class Outcome:
    """What came of a storm; what is in `wrong` must not have happened."""

    wrong: list[str] = field(default_factory=list)
    stalls_s: list[float] = field(default_factory=list)
    """Until each stalled reader was cut off."""
    kinds: Counter[str] = field(default_factory=Counter)


class Storm:
    """Clients of one mesh."""

    def __init__(self, mesh: Mesh, seed: int, *, stall_limit_s: float) -> None:
        """A reader that stalls is looked at for `stall_limit_s`."""
        self._place = Place(mesh.url)
        self._rng = random.Random(seed)
        self._stall_limit_s = stall_limit_s
        self._expected: dict[str, Said] = {}

    async def ask_alone(self) -> None:
        """Every ask by itself, streamed and whole: what the others are to get in the storm."""
        for ask in ASKS:
            found = [
                said(ask, await self._place.ask(request(ask.path, ask.body(is_stream=is_stream))))
                for is_stream in (False, True)
            ]
            assert found[0] == found[1], ask.name
            self._expected[ask.name] = found[0]

    async def run(self, count: int, over_s: float) -> Outcome:
        """Let so many clients come within `over_s`, and wait until all have gone."""
        outcome = Outcome()
        shares = [(self._hang_up, HANG_UPS), (self._stall, STALLS), (self._send_fault, FAULTY)]
        visits: list[Callable[[Outcome, int], Coroutine[Any, Any, None]]] = []
        for visit, share in shares:
            visits += [visit] * round(count * share)
        visits += [self._ask] * (count - len(visits))
        self._rng.shuffle(visits)
        async with asyncio.TaskGroup() as tasks:
            for number, visit in enumerate(visits):
                delay_s = over_s * self._rng.random()
                tasks.create_task(self._visit(visit(outcome, number), delay_s, outcome))
        return outcome

    async def _visit(
        self, visit: Coroutine[Any, Any, None], delay_s: float, outcome: Outcome
    ) -> None:
        await asyncio.sleep(delay_s)
        name = visit.__qualname__
        outcome.kinds[name.rpartition("._")[2]] += 1
        try:
            async with asyncio.timeout(_LIMIT_S):
                await visit
        except Exception as error:  # noqa: BLE001  # told with all others, whatever it was
            outcome.wrong.append(f"{name}: {error!r}"[:600])

    async def _ask(self, outcome: Outcome, number: int) -> None:
        ask = ASKS[number % len(ASKS)]
        body = ask.body(is_stream=self._rng.random() < 0.6)
        answer = await self._place.ask(request(ask.path, body))
        found, expected = said(ask, answer), self._expected[ask.name]
        assert found == expected, f"{ask.name}: {found} is not {expected}"

    async def _send_fault(self, outcome: Outcome, number: int) -> None:
        fault: Fault = FAULTS[number % len(FAULTS)]
        data = await self._place.ask(fault.data)
        assert data.status == fault.status, (fault.name, data)
        assert fault.word.encode() in data.body, (fault.name, data)

    async def _hang_up(self, outcome: Outcome, number: int) -> None:
        rng = self._rng
        phase = rng.choice(PHASES)
        sent, behind = self._phase(phase, rng.choice(ASKS))
        after_s = rng.uniform(0, 0.2) * rng.choice((0, 0.1, 1))
        is_abrupt = rng.random() < 0.5
        start = await self._place.leave(sent, behind=behind, after_s=after_s, is_abrupt=is_abrupt)
        assert b"HTTP/1.1 200 ".startswith(start[:13]), (phase, start[:300])

    def _phase(self, phase: str, ask: Ask) -> tuple[bytes, bytes | int]:
        """What a client sends that leaves in this phase, and what it reads before."""
        long, whole, quick = (
            request(ask.path, ask.body(is_stream=True, ignore_eos=True)),
            request(ask.path, ask.body(is_stream=False)),
            request(ask.path, ask.body(is_stream=True)),
        )
        phases: dict[str, tuple[bytes, bytes | int]] = {
            "in the head": (long[:60], 0),
            "in the body": (long[:-9], 0),
            "before the answer": (long, 0),
            "before a whole answer": (whole, 0),
            "in the answer's head": (long, 10),
            "in the stream": (long, self._rng.randint(500, 3000)),
            "at the end": (quick, LAST_CHUNK),
            "at the end of a whole answer": (whole, 300),
        }
        return phases[phase]

    async def _stall(self, outcome: Outcome, number: int) -> None:
        rng = self._rng
        messages = [{"role": "user", "content": f"Repeat: {number}"}]
        body: dict[str, Any] = {"model": "glm-nano", "stream": rng.random() < 0.6}
        body |= {"messages": messages, "max_tokens": _STALL_TOKENS, **_TOKEN_FIELDS}
        num_read = rng.choice((0, 1, 200, 5000))
        outcome.stalls_s.append(
            await self._place.stall(
                request(CHAT, body), num_read=num_read, limit_s=self._stall_limit_s
            )
        )
