"""Layers of experts on ranks that are threads, against one rank with all experts."""

import threading
import zlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from services.worker import ops
from services.worker.model.experts import MixtureOfExperts
from services.worker.model.experts_parallel import ExpertParallelMixture
from services.worker.model.metadata import ExpertTraffic
from services.worker.model.spec import ModelSpec
from services.worker.model.stream import RowShare, Stream
from services.worker.ops import distribute
from services.worker.parallel.groups import Groups
from services.worker.parallel.moe_method import MoeMethod
from services.worker.parallel.topology import Topology
from tests.services.worker.parallel.thread_groups import ThreadGroup, make_groups, run_together

_PLACE = threading.local()
"""Of the rank that a thread is."""


def fill_block(block: Any) -> None:
    """Every rank keeps its part of the same random tensors."""
    for slot in block.slots():
        generator = torch.Generator().manual_seed(zlib.crc32(slot.name.encode()))
        whole = torch.randn(slot.shape, generator=generator) * slot.shape[-1] ** -0.5
        slot.store(whole if slot.window is None else whole[slot.window])


def make_ranks(spec: ModelSpec, layout: str, *, is_flashcomm: bool = False) -> list[Any]:
    """The layer's part on each rank of the layout."""
    topology = Topology.parse(layout)
    groups: list[dict[str, ThreadGroup]] = [{} for _ in range(topology.world_size)]
    for group in topology.groups():
        if group.name in {"tp", "dp", "ep", "mc2"} and len(group.members) > 1:
            made = make_groups(group.name, len(group.members))
            for rank, member in zip(group.members, made, strict=True):
                groups[rank][group.name] = member
    blocks = []
    for rank in range(topology.world_size):
        placement = topology.placement(spec.config, topology.coordinates(rank))
        placement = replace(placement, is_flashcomm=is_flashcomm)
        own = replace(spec, placement=placement, groups=Groups(**groups[rank]))
        block: Any = ExpertParallelMixture(own, "mlp.")
        block.group = own.groups.tp
        fill_block(block)
        blocks.append(block)
    return blocks


def run_layer(
    spec: ModelSpec,
    layout: str,
    method: MoeMethod,
    counts: list[int],
    *,
    is_flashcomm: bool = False,
) -> list[tuple[Tensor, Tensor]]:
    """For each rank of each replica of `counts` tokens: what it has afterwards, and what is due.

    Of a cut stream a rank is given its share, and has sums for that alone.
    """
    # The compiled kernels' threads serve one caller at a time.
    ops.set_num_threads(1)
    topology = Topology.parse(layout)
    blocks = make_ranks(spec, layout, is_flashcomm=is_flashcomm)
    whole = MixtureOfExperts(spec, "mlp.")
    fill_block(whole)
    generator = torch.Generator().manual_seed(8)
    tokens = [torch.randn(count, spec.config.hidden_size, generator=generator) for count in counts]
    traffic = ExpertTraffic(method=method, num_tokens=max(counts))
    due = [whole(x, step_of(Stream.alone(len(x)))) for x in tokens]

    def work(rank: int) -> tuple[Tensor, Tensor]:
        at = topology.coordinates(rank)
        place = topology.placement(spec.config, at)
        _PLACE.ep_rank = place.ep_rank
        share = RowShare(num_rows=counts[at.dp_rank], size=place.tp_size, rank=place.tp_rank)
        stream = Stream(share=share, group=blocks[rank].group, is_cut=is_flashcomm)
        x, expected = tokens[at.dp_rank].clone(), due[at.dp_rank]
        if is_flashcomm:
            x, expected = share.of(x), expected[share.rows]
        found = blocks[rank](x, step_of(stream, traffic))
        return found[: len(expected)], expected

    return run_together(work, topology.world_size)


def step_of(stream: Stream, traffic: ExpertTraffic | None = None) -> Any:
    """What a block asks of a step."""
    step: Any = type("Step", (), {})()
    step.stream, step.traffic = stream, traffic
    return step


def check_layer(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for found, expected in pairs:
        # Sums of a few products of size 1 in another order, in float32.
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def hand_over(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """The fused operators exchange rows with the threads of the other ranks."""
    members = make_groups("rows", Topology.parse(layout).expert_parallel_size)

    def exchange(rows: Tensor, received: Any, sent: Any, group: str) -> Tensor:
        assert group == "mc2"
        even = [1] * len(rows)
        return members[_PLACE.ep_rank].all_to_all(rows, received or even, sent or even)

    monkeypatch.setattr(distribute, "_exchange", exchange)
