"""How often replicas that share experts take prompts: intervals against each other, by load.

A prompt makes a step a long one for all replicas of a world. Taking prompts in every step makes
every step long; taking them seldom lets prompts wait.
"""

import gc
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.simulate.device_time import Roofline
from benchmarks.simulate.hardware import DEVICES
from benchmarks.simulate.report import summarize
from benchmarks.simulate.sizes import read_sizes
from benchmarks.simulate.traces import TRACES, Load
from benchmarks.simulate.world import World
from services.scheduler.limits import CoreConfig

INTERVALS: Final = (1, 2, 3, 4, 8)
DEVICES_PER_REPLICA: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What is asked of a world of so many replicas, requests per second for all of them."""

    trace: str
    rate: float
    world_size: int = 4
    seconds: float = 30.0


OFFERS: Final = (
    Offer(trace="poisson", rate=4),
    Offer(trace="poisson", rate=12),
    Offer(trace="poisson", rate=20),
    Offer(trace="agents", rate=2),
    Offer(trace="agents", rate=5),
    Offer(trace="mixed", rate=6),
    Offer(trace="poisson", rate=6, world_size=2),
    Offer(trace="poisson", rate=40, world_size=8),
)


def compare_intervals(
    offers: Sequence[Offer] = OFFERS, intervals: Sequence[int] = INTERVALS
) -> list[dict[str, object]]:
    """A line for each interval under each load; the same requests for all intervals."""
    gc.freeze()
    lines = []
    for offer in offers:
        for interval in intervals:
            lines.append(run(offer, interval))
            sys.stdout.write(json.dumps(lines[-1]) + "\n")
            sys.stdout.flush()
    return lines


def run(offer: Offer, interval: int) -> dict[str, object]:
    """One interval under one load, on replicas of eight A3 dies that share their experts."""
    device = Roofline(
        read_sizes(),
        DEVICES["a3"],
        "w4a8c8",
        num_devices=DEVICES_PER_REPLICA,
        num_expert_devices=offer.world_size * DEVICES_PER_REPLICA,
        world_size=offer.world_size,
    )
    config = CoreConfig(max_plans_in_flight=2, prefill_schedule_interval=interval)
    world = World(config, device, offer.world_size, world_size=offer.world_size)
    load = Load(rate=offer.rate, seconds=offer.seconds)
    outcome = world.run(TRACES[offer.trace](load), until_s=20 * offer.seconds)
    line = {
        "claim": "intervals",
        "interval": interval,
        "trace": offer.trace,
        "rate": offer.rate,
        "world": offer.world_size,
    }
    return line | summarize(outcome, offer.seconds, offer.world_size)
