"""Run the output machine over token ids and show the result as a client would see it."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from services.detokenizer.calls import CallRules
from services.detokenizer.delta import Delta
from services.detokenizer.machine import MachineRules, OutputMachine
from services.detokenizer.schema import ArgumentTypes
from services.detokenizer.stops import StopAutomaton, StopMatcher
from shared.glm.tokenizer import Vocabulary
from tests.services.detokenizer.words import VOCABULARY, ids

TOOLS: dict[str, Any] = {
    "get_weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "now": {"properties": {}},
    "raw": None,
}


@dataclass
class Shown:
    """What a client has put together."""

    reasoning: str = ""
    content: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        self.deltas.append(delta)
        self.reasoning += "".join(delta.reasoning)
        self.content += "".join(delta.content)
        for piece in delta.merged_tools():
            if piece.call_id:
                assert piece.index == len(self.calls)
                assert piece.name
                self.calls.append({"id": piece.call_id, "name": piece.name, "arguments": ""})
            self.calls[piece.index]["arguments"] += piece.arguments

    @property
    def named(self) -> list[tuple[str, str]]:
        return [(call["name"], call["arguments"]) for call in self.calls]

    @property
    def arguments(self) -> list[str]:
        """Pieces of arguments in the order in which they were sent."""
        return [p.arguments for delta in self.deltas for p in delta.tools if p.arguments]


def machine(
    tools: dict[str, Any] | None = None,
    *,
    allowed: Sequence[str] | None = None,
    starts_in_reasoning: bool = False,
    parses_reasoning: bool = True,
    stops: Sequence[str] = (),
    vocabulary: Vocabulary = VOCABULARY,
) -> OutputMachine:
    declared = TOOLS if tools is None else tools
    numbers = itertools.count()
    return OutputMachine(
        vocabulary,
        MachineRules(
            calls=CallRules(
                tools={name: ArgumentTypes(schema) for name, schema in declared.items()},
                allowed=frozenset(declared if allowed is None else allowed),
            ),
            starts_in_reasoning=starts_in_reasoning,
            parses_reasoning=parses_reasoning,
        ),
        make_id=lambda: f"call_{next(numbers)}",
        stops=StopMatcher(StopAutomaton(stops)) if stops else None,
    )


def run(
    made: OutputMachine,
    tokens: Sequence[int],
    *,
    groups: Sequence[int] = (1,),
    is_cut: bool = False,
) -> Shown:
    """Push tokens in groups of the given sizes, cycled; 0 stands for all the rest."""
    shown, start, sizes = Shown(), 0, itertools.cycle(groups)
    while start < len(tokens):
        end = (start + size) if (size := next(sizes)) else len(tokens)
        for token in tokens[start:end]:
            made.push(token)
        shown.add(made.take())
        start = end
    made.finish(is_cut=is_cut)
    shown.add(made.take())
    return shown


def show(text: str, *, is_cut: bool = False, ordinary: Sequence[str] = (), **options: Any) -> Shown:
    """What becomes of an output text, token by token."""
    return run(machine(**options), ids(text, ordinary=ordinary), is_cut=is_cut)
