"""Ranks and groups of a deployment: who holds what, and which ranks talk to each other.

Axes from slowest to fastest: data parallel, pipeline, tensor parallel. Decode context parallelism
adds no ranks, it divides the cached tokens over tensor-parallel ones. Expert parallelism takes all
ranks of a pipeline stage, of all replicas.
"""

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from services.worker.model.config import SHARED, ModelConfig
from services.worker.model.placement import Placement
from shared.errors import ConfigError

_PART: Final = re.compile(r"(dp|pp|tp|dcp)(\d{1,5})(?:\[([\d/]+)\])?")
_FIELDS: Final = {
    "dp": "data_parallel_size",
    "pp": "pipeline_parallel_size",
    "tp": "tensor_parallel_size",
    "dcp": "decode_context_parallel_size",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One rank's coordinates."""

    dp_rank: int
    pp_rank: int
    tp_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that communicate: all groups of one name together cover the world."""

    name: str
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Sizes of the parallel axes; the names are those of vLLM's flags."""

    data_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    tensor_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    enable_expert_parallel: bool = False
    layer_partition: tuple[int, ...] = ()
    """Layers of each pipeline stage; empty: as even as possible."""

    def __post_init__(self) -> None:
        for name in _FIELDS.values():
            if getattr(self, name) < 1:
                raise ConfigError(f"{_flag(name)} {getattr(self, name)}: must be at least 1")
        tp, dcp = self.tensor_parallel_size, self.decode_context_parallel_size
        if dcp not in {1, tp}:
            # The sparse kernels of A2 and A3 find every row of the history in one group.
            raise ConfigError(
                f"--decode-context-parallel-size {dcp} and --tensor-parallel-size {tp}: the first "
                "must be 1 or equal to the second"
            )
        stages = self.pipeline_parallel_size
        if self.layer_partition and len(self.layer_partition) != stages:
            raise ConfigError(
                f"--pp-layer-partition {_listed(self.layer_partition)} has "
                f"{len(self.layer_partition)} stages, --pipeline-parallel-size is {stages}"
            )

    @classmethod
    def parse(cls, text: str) -> "Topology":
        """Read `dp2,tp8,ep` or `pp2[41/37],tp16,ep` or `tp16,dcp16,ep`.

        Raises:
            ConfigError: A word is unknown or given twice, or the sizes exclude each other.
        """
        sizes: dict[str, int] = {}
        partition: tuple[int, ...] = ()
        is_expert_parallel = False
        for word in text.replace(" ", "").lower().split(","):
            if word == "ep":
                is_expert_parallel = True
                continue
            match = _PART.fullmatch(word)
            if match is None or match[1] in sizes or (match[3] and match[1] != "pp"):
                raise ConfigError(
                    f"--topology {text!r}: {word!r}: must be words like dp2, pp2[41/37], tp8, "
                    "dcp8 and ep, each once"
                )
            sizes[match[1]] = int(match[2])
            if match[3]:
                partition = _layers(match[3], "/", f"--topology {text!r}")
        return cls(
            **{_FIELDS[axis]: size for axis, size in sizes.items()},
            enable_expert_parallel=is_expert_parallel,
            layer_partition=partition,
        )

    def __str__(self) -> str:
        """The text that `parse` reads."""
        words = []
        for axis, name in _FIELDS.items():
            size = getattr(self, name)
            if size > 1 or axis == "tp":
                stages = f"[{_listed(self.layer_partition, '/')}]" if self.layer_partition else ""
                words.append(f"{axis}{size}{stages if axis == 'pp' else ''}")
        return ",".join([*words, *(["ep"] if self.enable_expert_parallel else [])])

    @property
    def replica_size(self) -> int:
        """Ranks of one replica."""
        return self.pipeline_parallel_size * self.tensor_parallel_size

    @property
    def world_size(self) -> int:
        """Ranks of all replicas."""
        return self.data_parallel_size * self.replica_size

    @property
    def expert_parallel_size(self) -> int:
        """Ranks that the experts of a layer are spread over; 1 where they are cut instead."""
        if not self.enable_expert_parallel:
            return 1
        return self.data_parallel_size * self.tensor_parallel_size

    def rank_of(self, rank: Rank) -> int:
        """A rank's number in the world."""
        stage = rank.dp_rank * self.pipeline_parallel_size + rank.pp_rank
        return stage * self.tensor_parallel_size + rank.tp_rank

    def coordinates(self, number: int) -> Rank:
        """The rank with a number."""
        rest, tp_rank = divmod(number, self.tensor_parallel_size)
        dp_rank, pp_rank = divmod(rest, self.pipeline_parallel_size)
        return Rank(dp_rank=dp_rank, pp_rank=pp_rank, tp_rank=tp_rank)

    def stages(self, config: ModelConfig) -> tuple[range, ...]:
        """Decoder layers of each pipeline stage.

        Raises:
            ConfigError: The partition does not add up to the model's layers.
        """
        count, total = self.pipeline_parallel_size, config.num_hidden_layers
        if count > total:
            raise ConfigError(
                f"--pipeline-parallel-size {count} is above num_hidden_layers={total} of the model"
            )
        sizes = self.layer_partition or _even_stages(total, count)
        if sum(sizes) != total or min(sizes) < 1:
            raise ConfigError(
                f"--pp-layer-partition {_listed(sizes)} must add up to num_hidden_layers={total} "
                "of the model, at least one layer each"
            )
        ends = [sum(sizes[: stage + 1]) for stage in range(count)]
        return tuple(range(end - size, end) for end, size in zip(ends, sizes, strict=True))

    def placement(
        self,
        config: ModelConfig,
        rank: Rank,
        *,
        is_dsa_cp: bool = False,
        is_flashcomm: bool = False,
    ) -> Placement:
        """What a rank holds of the model; one alone has no tokens to cut."""
        layers = self.stages(config)[rank.pp_rank]
        tp, ep = self.tensor_parallel_size, self.expert_parallel_size
        return Placement(
            tp_size=tp,
            tp_rank=rank.tp_rank,
            ep_size=ep,
            ep_rank=rank.dp_rank * tp + rank.tp_rank if ep > 1 else 0,
            first_layer=layers.start,
            last_layer=layers.stop,
            is_dsa_cp=is_dsa_cp and tp > 1,
            is_flashcomm=is_flashcomm and tp > 1,
        )

    @property
    def is_joint(self) -> bool:
        """Whether replicas share experts, and so one world; else each is a world of its own."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    @property
    def joint_size(self) -> int:
        """Ranks that meet at all: those of a world."""
        return self.world_size if self.is_joint else self.replica_size

    def groups(self) -> tuple[Group, ...]:
        """All groups in the order in which every rank must create them.

        Where replicas are worlds of their own the groups are those of the first.
        """
        is_joint = self.enable_expert_parallel
        dps = range(self.data_parallel_size if is_joint else 1)
        pps, tps = range(self.pipeline_parallel_size), range(self.tensor_parallel_size)
        world = tuple(range(len(dps) * self.replica_size))
        dcp = self.decode_context_parallel_size
        made = [Group(name="world", members=world)]
        for name in ("replica", "orders"):
            made += [self._group(name, (dp,), pps, tps) for dp in dps]
        made += [self._group("tp", (dp,), (pp,), tps) for dp in dps for pp in pps]
        made += [Group(name="dcp", members=world[at : at + dcp]) for at in world[::dcp]]
        made += [self._group("pp", (dp,), pps, (tp,)) for dp in dps for tp in tps]
        made += [self._group("dp", dps, (pp,), (tp,)) for pp in pps for tp in tps]
        for name in ("ep", "mc2") if is_joint else ():
            made += [self._group(name, dps, (pp,), tps) for pp in pps]
        return tuple(made)

    def _group(
        self, name: str, dps: Iterable[int], pps: Iterable[int], tps: Iterable[int]
    ) -> Group:
        """The ranks with these coordinates, ascending."""
        members = (
            self.rank_of(Rank(dp_rank=dp, pp_rank=pp, tp_rank=tp))
            for dp, pp, tp in itertools.product(dps, pps, tps)
        )
        return Group(name=name, members=tuple(members))

    def notes(self, config: ModelConfig) -> list[str]:
        """What a reader of the plan should know about this layout."""
        notes = []
        for stage, layers in enumerate(self.stages(config)):
            if stage and config.indexer_types[layers.start] == SHARED:
                notes.append(
                    f"stage {stage} starts at layer {layers.start}, which shares the selection of "
                    "an earlier layer: the indices must be sent with the hidden states"
                )
        return notes


def read_partition(text: str) -> tuple[int, ...]:
    """Layers of each stage as VLLM_PP_LAYER_PARTITION lists them: `41,37`."""
    return _layers(text, ",", f"--pp-layer-partition {text!r}")


def _layers(text: str, separator: str, flag: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(separator))
    except ValueError:
        raise ConfigError(f"{flag}: {text!r} must be counts of layers") from None


def _even_stages(total: int, count: int) -> tuple[int, ...]:
    """Even stages; what is left goes one each to those before the last, from the back."""
    part, rest = divmod(total, count)
    return tuple(part + (count - 1 - rest <= stage < count - 1) for stage in range(count))


def _listed(sizes: Sequence[int], separator: str = ",") -> str:
    return separator.join(str(size) for size in sizes)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
