"""Ways of starting the same model, and a small choice of them in which every two options meet.

The choice is computed: first all ways that can be started, then, one by one, that with the most
pairs of options which no way chosen before it has.
"""

import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

Experts = Literal["cut", "allgather", "alltoall", "mc2"]
Graphs = Literal["recorded", "sizes", "eager"]
Tokens = Literal["whole", "dsa_cp", "flashcomm1"]

MAX_RANKS: Final = 4
NUM_SEQS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Way:
    """One way of starting the mesh."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    experts: Experts = "cut"
    """Cut like everything else, or whole ones spread over ranks, and how tokens reach them."""
    drafts: int = 0
    graphs: Graphs = "eager"
    """Steps recorded at any size, captured at chosen ones, or operators called one by one."""
    tokens: Tokens = "whole"
    """Whether ranks of a layer cut a step's tokens in attention, or there and between blocks."""

    @property
    def num_ranks(self) -> int:
        """Worker processes."""
        return self.tp * self.pp * self.dp

    @property
    def is_possible(self) -> bool:
        """Whether there is such a mesh, and every option has an effect in it."""
        if self.num_ranks > MAX_RANKS:
            return False
        if (self.experts != "cut" and self.tp * self.dp == 1) or self.tp < self._least_tp:
            return False
        if self.graphs == "recorded":
            return self.tp == self.pp == 1 and self.experts == "cut"
        # On a CPU the other ways to experts tell the host how many rows they bring.
        return self.graphs == "eager" or (self.pp == 1 and self.experts in {"cut", "allgather"})

    @property
    def flags(self) -> list[str]:
        """Of `glm-mesh up`."""
        flags = ["-tp", str(self.tp), "-pp", str(self.pp), "-dp", str(self.dp)]
        if self.experts != "cut":
            flags.append("--enable-expert-parallel")
        if self.drafts:
            config = {"method": "deepseek_mtp", "num_speculative_tokens": self.drafts}
            flags += ["--speculative-config", json.dumps(config)]
        if self.graphs == "eager":
            flags.append("--enforce-eager")
        elif self.graphs == "sizes":
            # Ranks that cut tokens take sizes that they can share.
            some = (1, 3, NUM_SEQS) if self.tokens == "whole" else (MAX_RANKS, NUM_SEQS)
            sizes = [(1 + self.drafts) * num_seqs for num_seqs in some]
            config = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
            flags += ["--compilation-config", json.dumps(config)]
        if self.tokens != "whole":
            cuts = {"enable_dsa_cp": True, "enable_flashcomm1": self.tokens == "flashcomm1"}
            flags += ["--additional-config", json.dumps(cuts)]
        return flags

    @property
    def environment(self) -> dict[str, str]:
        """What no flag of vLLM's says."""
        variables = {}
        if self.experts != "cut":
            variables["GLM_MESH_WORKER_MOE_COMM_METHOD"] = self.experts
        if self.pp > 1:
            # The second stage starts on a layer that takes the positions selected by another one.
            variables["VLLM_PP_LAYER_PARTITION"] = "2,3"
        return variables

    def __str__(self) -> str:
        parts = [f"{name}{size}" for name, size in self._sizes if size > 1] or ["alone"]
        return "-".join([*parts, self.experts, f"drafts{self.drafts}", self.graphs, self.tokens])

    @property
    def _least_tp(self) -> int:
        return 1 if self.tokens == "whole" else 2

    @property
    def _sizes(self) -> list[tuple[str, int]]:
        return [("tp", self.tp), ("pp", self.pp), ("dp", self.dp)]


Option = tuple[str, object]
Pair = frozenset[Option]

# What is varied against everything else.
FACTORS: Final[Mapping[str, Callable[[Way], object]]] = MappingProxyType(
    {
        "tp": lambda way: way.tp,
        "pp": lambda way: way.pp,
        "dp": lambda way: way.dp,
        "are experts spread": lambda way: way.experts != "cut",
        "drafts": lambda way: way.drafts,
        "graphs": lambda way: way.graphs,
        "are tokens cut": lambda way: way.tokens != "whole",
    }
)
# Each of these meets the options below: whether there are drafts, not how many, which is varied
# against experts that are spread at all and tokens that are cut at all. More has no room in sixteen
# meshes.
KINDS: Final[Mapping[str, Callable[[Way], object]]] = MappingProxyType(
    {"experts": lambda way: way.experts, "tokens": lambda way: way.tokens}
)
_COARSE: Final[Mapping[str, Callable[[Way], object]]] = MappingProxyType(
    {
        "are layers cut": lambda way: way.tp > 1,
        "pp": lambda way: way.pp,
        "dp": lambda way: way.dp,
        "has drafts": lambda way: way.drafts > 0,
        "are experts spread": lambda way: way.experts != "cut",
        "are tokens cut": lambda way: way.tokens != "whole",
    }
)


def all_ways() -> list[Way]:
    """Every way that can be started."""
    sizes: Sequence[int] = (1, 2, 4)
    methods: Sequence[Experts] = ("cut", "allgather", "alltoall", "mc2")
    modes: Sequence[Graphs] = ("recorded", "sizes", "eager")
    cuts: Sequence[Tokens] = ("whole", "dsa_cp", "flashcomm1")
    found = (
        Way(tp=tp, pp=pp, dp=dp, experts=experts, drafts=drafts, graphs=graphs, tokens=tokens)
        for tp, pp, dp in itertools.product(sizes, sizes[:2], sizes[:2])
        for drafts, graphs in itertools.product((0, 1, 3, 5), modes)
        for experts, tokens in itertools.product(methods, cuts)
    )
    return sorted(way for way in found if way.is_possible)


def options_of(way: Way) -> set[Option]:
    """The options of a way one by one."""
    return {(name, read(way)) for name, read in (*FACTORS.items(), *KINDS.items())}


def pairs_of(way: Way) -> set[Pair]:
    """The pairs of options that meet in a way."""
    options = [(name, read(way)) for name, read in FACTORS.items()]
    kinds = [(name, read(way)) for name, read in KINDS.items()]
    coarse = [(name, read(way)) for name, read in _COARSE.items()]
    fine = {frozenset(pair) for pair in itertools.combinations(options, 2)}
    return fine | {frozenset(pair) for pair in itertools.product(kinds, coarse)}


def cover(
    ways: Sequence[Way],
    parts_of: Callable[[Way], Iterable[object]],
    *,
    first: Sequence[Way] = (),
    num_tries: int = 16,
) -> list[Way]:
    """Few ways that have every part which any of `ways` has; the shortest list of some tries.

    Args:
        ways: To choose from.
        parts_of: What is to be there, of one way.
        first: Chosen in any case.
        num_tries: Lists that are made, each with other choices among ways that are about as good.
    """
    parts = {way: frozenset(parts_of(way)) for way in (*first, *ways)}
    counts = Counter(itertools.chain.from_iterable(parts.values()))
    tries = (_choose(parts, counts, first, random.Random(seed)) for seed in range(num_tries))
    return min(tries, key=lambda chosen: (len(chosen), sum(way.num_ranks for way in chosen)))


def _choose(
    parts: Mapping[Way, frozenset[object]],
    counts: Mapping[object, int],
    first: Sequence[Way],
    rng: random.Random,
) -> list[Way]:
    """A way that has much that is missing and rare, again and again."""
    chosen, missing = list(first), set(counts).difference(*(parts[way] for way in first))
    while missing:
        # Exact: sets have another order in each process, and the choice must be the same.
        worth = {way: math.fsum(1 / counts[p] for p in parts[way] & missing) for way in parts}
        most = 0.9 * max(worth.values())
        chosen.append(rng.choice([way for way in parts if worth[way] >= most]))
        missing -= parts[chosen[-1]]
    for way in chosen[len(first) :]:
        rest = [parts[other] for other in chosen if other is not way]
        if counts.keys() == frozenset().union(*rest):
            chosen.remove(way)
    return chosen


# What the others are held against: how `glm-mesh up` starts by itself.
PLAIN: Final = Way(graphs="recorded")


def pairwise() -> list[Way]:
    """The plain way, and others in which every two options meet that can."""
    return cover(all_ways(), pairs_of, first=(PLAIN,))


def each_once(ways: Sequence[Way]) -> list[Way]:
    """The plain way, and a few of `ways` in which every option is there."""
    return cover(ways, options_of, first=(PLAIN,))
