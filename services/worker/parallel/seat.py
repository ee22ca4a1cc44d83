"""A process's seat in its world, from the flags: what it holds and what it agrees on."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

from services.worker.device import open_device
from services.worker.model.spec import ModelSpec
from services.worker.parallel.groups import Group
from services.worker.parallel.hccl import Mc2Window, read_buffer_mib
from services.worker.parallel.moe_method import Hardware, MoeMethod, MoeRules
from services.worker.parallel.rendezvous import JoinError
from services.worker.parallel.topology import Rank
from services.worker.parallel.watch import Watch, make_watch
from services.worker.parallel.world import Membership, World
from services.worker.runner import BuildStoppedError, WorldLostError
from services.worker.settings import WorkerSettings
from services.worker.step_sizes import decode_sizes
from shared.errors import ConfigError

_SHARED_SETTINGS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "num_speculative_tokens",
    "weight_nz_mode",
    "enable_dsa_cp",
    "enable_flashcomm1",
    "moe_comm_method",
    "check_rows",
    "cudagraph_mode",
    "cudagraph_capture_sizes",
    "max_cudagraph_capture_size",
    "enforce_eager",
    "stall_timeout_s",
)
_MARGIN_S = 5.0
"""An exchange may wait so much longer than a step may take: who is late has been named by then."""


class Seating:
    """What a process's other threads know of its seat, which the runner's thread takes."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.watch: Watch | None = None
        self.seat: Seat | None = None

    @property
    def verdict(self) -> str:
        """Why the world is lost, naming rank and step; empty while it stands."""
        return "" if self.watch is None else self.watch.verdict

    def fail(self, reason: str) -> None:
        """This rank cannot go on; tell the others, if they are there already."""
        if self.watch is not None and not self.watch.verdict:
            self.watch.fail(reason, is_echo=False)

    def orders(self) -> Group:
        """The group that orders travel in, once the seat is taken."""
        assert self.seat is not None
        return self.seat.world.groups.orders

    def take(self, is_stopping: Callable[[], bool]) -> Seat:
        """Meet the other ranks and build the groups.

        Raises:
            ConfigError: The rendezvous cannot be used.
            JoinError: Ranks are missing.
        """
        settings = self.settings
        assert settings.rendezvous is not None
        membership = Membership(
            topology=settings.topology,
            number=settings.world_rank,
            # Before the groups: an NPU's come with its library.
            device=open_device(settings.device),
            rendezvous=settings.rendezvous,
            timeout_s=settings.stall_timeout_s + _MARGIN_S,
            hccl_mib=read_buffer_mib(os.environ),
        )
        world = World.meet(membership, is_stopping)
        self.watch = make_watch(
            world.store,
            settings.rendezvous,
            rank=membership.number,
            size=membership.topology.joint_size,
            progress=world.progress,
            limit_s=settings.stall_timeout_s,
        )
        self.watch.start()
        world.build_groups()
        self.seat = Seat(settings=settings, world=world, watch=self.watch)
        return self.seat

    def leave(self) -> None:
        """Give the seat up in good order, if it was taken."""
        if self.watch is not None:
            self.watch.close()
        if self.seat is not None:
            self.seat.world.leave()


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One rank of a world that has come together."""

    settings: WorkerSettings
    world: World
    watch: Watch

    @property
    def rank(self) -> Rank:
        """Coordinates."""
        return self.world.membership.rank

    def place(self, spec: ModelSpec) -> ModelSpec:
        """The part of a model that this rank holds."""
        placement = self.settings.topology.placement(
            spec.config,
            self.rank,
            is_dsa_cp=self.settings.enable_dsa_cp,
            is_flashcomm=self.settings.enable_flashcomm1,
        )
        return replace(spec, placement=placement, groups=self.world.groups)

    def rules(self, spec: ModelSpec) -> MoeRules:
        """What chooses how tokens reach experts."""
        settings, topology, config = self.settings, self.settings.topology, spec.config
        method = settings.moe_comm_method
        is_host = spec.device.type == "cpu"
        hardware: Hardware = "cpu" if is_host else spec.cache.generation
        return MoeRules(
            hardware=hardware,
            ep_size=topology.expert_parallel_size,
            tp_size=topology.tensor_parallel_size,
            num_experts=config.n_routed_experts,
            num_experts_per_tok=config.num_experts_per_tok,
            mc2_tokens=self._largest_decode(spec),
            # Operators of a host are made of exchanges, which have no window.
            window=None if is_host else self._window(spec),
            forced=None if method == "auto" else MoeMethod(method),
        )

    def _largest_decode(self, spec: ModelSpec) -> int:
        """Tokens of the largest captured step; if there is none, of decodes of all sequences."""
        settings = self.settings
        if settings.captures_steps and settings.pipeline_parallel_size == 1:
            sizes = decode_sizes(
                settings,
                asked=settings.cudagraph_capture_sizes,
                largest=settings.max_cudagraph_capture_size,
                multiple=spec.placement.token_multiple,
            )
            if sizes:
                return sizes[-1]
        tokens = settings.max_num_seqs * (1 + settings.num_speculative_tokens)
        return min(tokens, settings.max_num_batched_tokens)

    def _window(self, spec: ModelSpec) -> Mc2Window:
        ranks, config = self.settings.topology.expert_parallel_size, spec.config
        return Mc2Window(
            is_a3=spec.cache.generation == "a3",
            buffer_mib=self.world.membership.hccl_mib,
            num_ranks=ranks,
            num_experts=-(-config.n_routed_experts // ranks),
            num_choices=config.num_experts_per_tok,
            num_shared_experts=config.n_shared_experts,
            hidden_size=config.hidden_size,
        )

    def wait_for_others(self, topic: str, is_stopping: Callable[[], bool]) -> None:
        """Wait until every rank is here, however long that takes.

        Raises:
            WorldLostError: One of them is lost.
        """
        self._gather(topic, "", is_stopping)

    def least(self, topic: str, own: int) -> int:
        """The smallest of the ranks' numbers."""
        return min(map(int, self._gather(topic, str(own))))

    def agree(self, spec: ModelSpec, facts: dict[str, object]) -> None:
        """Refuse ranks that were started for something else.

        Raises:
            ConfigError: On every rank, naming those that differ from rank 0 and in what.
        """
        settings = self.settings
        own = {
            "topology": str(settings.topology),
            "dtype": str(spec.dtype),
            "cache": str(spec.cache),
            "HCCL_BUFFSIZE": self.world.membership.hccl_mib,
            **{name: getattr(settings, name) for name in _SHARED_SETTINGS},
            **facts,
        }
        found = [json.loads(text) for text in self._gather("settings", json.dumps(own))]
        for name in own:
            others = [str(at) for at, other in enumerate(found) if other[name] != found[0][name]]
            if others:
                raise ConfigError(
                    f"{name} is {found[0][name]} on rank 0 and something else on rank "
                    f"{', '.join(others)}: all ranks of a world must have the same"
                )

    def _gather(
        self, topic: str, text: str, is_stopping: Callable[[], bool] = lambda: False
    ) -> list[str]:
        def is_over() -> bool:
            return bool(self.watch.verdict) or is_stopping()

        try:
            return self.world.gather(topic, text, timeout_s=math.inf, is_stopping=is_over)
        except JoinError as error:
            if self.watch.verdict:
                raise WorldLostError(self.watch.verdict) from None
            raise BuildStoppedError from error
