"""Policies against each other: the same requests, one setting changed. One JSON line per run."""

import dataclasses
import gc
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.simulate.chart import draw
from benchmarks.simulate.device_time import Roofline
from benchmarks.simulate.hardware import DEVICES
from benchmarks.simulate.report import percentiles, summarize
from benchmarks.simulate.sizes import read_sizes
from benchmarks.simulate.traces import TRACES, Load
from benchmarks.simulate.world import Outcome, Served, World
from services.scheduler.limits import CoreConfig

# A prompt of at least so many tokens is one of the long ones of the trace `mixed`.
LONG_PROMPT: Final = 50_000
BASE: Final = CoreConfig(max_plans_in_flight=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A setting under a load; `share_of_blocks` makes the cache smaller."""

    name: str
    trace: str
    rate: float
    config: CoreConfig
    seconds: float = 60.0
    share_of_blocks: float = 1.0


def _with(**changes: object) -> CoreConfig:
    return dataclasses.replace(BASE, **changes)  # type: ignore[arg-type]  # fields by name


CASES: Final = (
    Case(name="one plan in flight", trace="poisson", rate=6, config=_with(max_plans_in_flight=1)),
    Case(name="one step ahead", trace="poisson", rate=6, config=BASE),
    Case(
        name="no prompt is long",
        trace="mixed",
        rate=3,
        config=_with(long_prefill_token_threshold=0),
    ),
    Case(name="long prompts throttled", trace="mixed", rate=3, config=BASE),
    Case(
        name="long prompts throttled, one at once",
        trace="mixed",
        rate=3,
        config=_with(max_long_partial_prefills=1),
    ),
    Case(
        name="tenants by arrival",
        trace="tenants",
        rate=20,
        config=_with(enable_fair_share=False),
    ),
    Case(name="tenants by share", trace="tenants", rate=20, config=BASE),
    Case(name="urgent, fcfs", trace="urgent", rate=12, config=BASE),
    Case(name="urgent, priority", trace="urgent", rate=12, config=_with(policy="priority")),
    Case(
        name="short of blocks, watermark 0",
        trace="long_answers",
        rate=2,
        config=BASE,
        share_of_blocks=0.25,
    ),
    Case(
        name="short of blocks, watermark 0.02",
        trace="long_answers",
        rate=2,
        config=_with(watermark=0.02),
        share_of_blocks=0.25,
    ),
    Case(
        name="short of blocks, watermark 0.05",
        trace="long_answers",
        rate=2,
        config=_with(watermark=0.05),
        share_of_blocks=0.25,
    ),
)


def compare(chart: Path | None = None, cases: tuple[Case, ...] = CASES) -> list[dict[str, object]]:
    """Run all cases; draws those of the trace `mixed`."""
    lines, drawn = [], {}
    gc.freeze()
    for case in cases:
        outcome = run(case)
        if case.trace == "mixed":
            drawn[case.name] = outcome
        line = {"claim": "policies", "case": case.name, "trace": case.trace, "rate": case.rate}
        lines.append(line | summarize(outcome, case.seconds, 1) | split(outcome))
        sys.stdout.write(json.dumps(lines[-1]) + "\n")
        sys.stdout.flush()
    if chart is not None:
        draw(drawn, chart)
    return lines


def run(case: Case) -> Outcome:
    """One case on one replica of eight A3 dies."""
    device = Roofline(
        read_sizes(),
        DEVICES["a3"],
        "w4a8c8",
        num_devices=8,
        num_expert_devices=16,
        share_of_blocks=case.share_of_blocks,
    )
    world = World(case.config, device)
    load = Load(rate=case.rate, seconds=case.seconds)
    return world.run(TRACES[case.trace](load), until_s=20 * case.seconds)


def split(outcome: Outcome) -> dict[str, object]:
    """Times to the first token of those that a policy treats alike."""
    kinds: dict[str, list[float]] = {}
    for served in outcome.served:
        if served.first_token_at is not None:
            waited = served.first_token_at - served.arrived_at
            kinds.setdefault(_kind(served), []).append(waited)
    return {f"ttft_ms_{kind}": percentiles(times) for kind, times in sorted(kinds.items())}


def _kind(served: Served) -> str:
    if served.num_prompt_tokens >= LONG_PROMPT:
        return "long"
    if served.priority:
        return "urgent"
    return served.tenant_id.split("-", maxsplit=1)[0] or "ordinary"
