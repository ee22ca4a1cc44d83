"""Stop strings in a growing text.

Only a suffix that may become a stop string is held back, never more. The stop string that is
complete first wins, among those complete at the same character the first of the list. One automaton
(Aho-Corasick) watches for all of them, so the cost per character does not grow with their number or
length. The caller pushes the text of one token at a time, so how tokens are grouped cannot matter.
"""

from collections.abc import Sequence


class StopAutomaton:
    """Every beginning of every stop string is a node; node 0 is the empty one. Never changes."""

    __slots__ = ("_children", "_fallback", "depth", "ending", "first", "stops")

    def __init__(self, stops: Sequence[str]) -> None:
        """Build it for `stops`, none empty."""
        self.stops = tuple(stops)
        self.first = frozenset(stop[0] for stop in stops)
        self._children: list[dict[str, int]] = [{}]
        self._fallback = [0]
        # Length of the node's text, and the first stop of the list that ends with it (-1: none).
        self.depth = [0]
        self.ending = [-1]
        for number, stop in enumerate(stops):
            self._add(number, stop)
        self._link()

    def step(self, node: int, character: str) -> int:
        """The node of the longest suffix after one more character."""
        while True:
            following = self._children[node].get(character)
            if following is not None:
                return following
            if node == 0:
                return 0
            node = self._fallback[node]

    def settle(self, node: int) -> int:
        """The longest suffix that can still grow into a stop string."""
        while node and not self._children[node]:
            node = self._fallback[node]
        return node

    def _add(self, number: int, stop: str) -> None:
        node = 0
        for character in stop:
            following = self._children[node].get(character)
            if following is None:
                following = len(self.depth)
                self._children[node][character] = following
                self._children.append({})
                self._fallback.append(0)
                self.depth.append(self.depth[node] + 1)
                self.ending.append(-1)
            node = following
        if self.ending[node] < 0:
            self.ending[node] = number

    def _link(self) -> None:
        pending = list(self._children[0].values())
        for node in pending:  # grows while it runs: breadth first
            for character, child in self._children[node].items():
                fallback = self.step(self._fallback[node], character)
                self._fallback[child] = fallback
                self.ending[child] = _first_of(self.ending[child], self.ending[fallback])
                pending.append(child)


class StopMatcher:
    """One growing text and the strings that end it.

    While `is_armed` is false nothing matches; a suffix is held back all the same, because a match
    may begin in that time and end after it.
    """

    __slots__ = ("_automaton", "_held", "_is_included", "_node", "is_armed", "matched")

    def __init__(self, automaton: StopAutomaton, *, is_included: bool = False) -> None:
        """Watch a new text; `is_included` keeps the matched string in it."""
        self._automaton = automaton
        self._is_included = is_included
        self._node = 0
        self._held = ""
        self.is_armed = True
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Add text; returns what can be shown now. After a match nothing comes any more."""
        if self.matched is not None:
            return ""
        automaton, node = self._automaton, self._node
        if node == 0 and automaton.first.isdisjoint(text):
            return text
        for position, character in enumerate(text):
            node = automaton.step(node, character)
            if self.is_armed and automaton.ending[node] >= 0:
                return self._match(automaton.ending[node], text[: position + 1])
        self._node = node = automaton.settle(node)
        window = self._held + text
        cut = len(window) - automaton.depth[node]
        self._held = window[cut:]
        return window[:cut]

    def flush(self) -> str:
        """What was held back for nothing; matching starts afresh behind it."""
        held, self._held, self._node = self._held, "", 0
        return held

    def _match(self, number: int, text: str) -> str:
        window, self._held = self._held + text, ""
        self.matched = stop = self._automaton.stops[number]
        return window if self._is_included else window[: len(window) - len(stop)]


def _first_of(one: int, other: int) -> int:
    return max(one, other) if min(one, other) < 0 else min(one, other)
