"""The scheduler under loads that this machine cannot serve: simulated devices, the real core.

    python -m benchmarks.simulate --trace agents --rate 2 --replicas 4 --chart run.svg
    python -m benchmarks.simulate --trace short --rate 2000 --replicas 64 --seconds 10
    python -m benchmarks.simulate --world 4 --replicas 8 --prefill-schedule-interval 4
    python -m benchmarks.simulate --drafts 3 --acceptance 0.97,0.58,0.34
    python -m benchmarks.simulate --policies                 # the table of docs/scheduling.md
    python -m benchmarks.simulate --intervals                # replicas that step together
    python -m benchmarks.simulate --calibrate                # against a run of the CPU mesh

One JSON line per run.
"""

import argparse
import gc
import json
import sys
from pathlib import Path

from benchmarks.simulate.calibrate import calibrate
from benchmarks.simulate.chart import draw
from benchmarks.simulate.device_time import Roofline
from benchmarks.simulate.hardware import DEVICES, MESSAGE_CPU_S, MESSAGE_S
from benchmarks.simulate.intervals import compare_intervals
from benchmarks.simulate.policies import compare
from benchmarks.simulate.report import summarize
from benchmarks.simulate.sizes import SCHEMES, read_sizes
from benchmarks.simulate.traces import TRACES, Load
from benchmarks.simulate.world import World
from services.scheduler.limits import CoreConfig

# Of `python -m benchmarks.drafts`: its questions, greedy, three drafts.
GLM_NANO_ACCEPTANCE = [0.97, 0.58, 0.34]


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", choices=sorted(TRACES), default="poisson")
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=60.0, help="for how long they come")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replicas", type=int, default=1, choices=range(1, 65), metavar="1..64")
    parser.add_argument("--hardware", choices=sorted(DEVICES), default="a3")
    parser.add_argument("--scheme", choices=sorted(SCHEMES), default="w4a8c8")
    parser.add_argument("--devices", type=int, default=8, help="of a replica (tensor parallel)")
    parser.add_argument(
        "--expert-devices",
        type=int,
        help="that share the experts; those of the world, 16 for replicas that step alone",
    )
    parser.add_argument("--world", type=int, default=1, help="replicas that step together")
    parser.add_argument("--prefill-schedule-interval", type=int, default=2)
    parser.add_argument("--drafts", type=int, default=0, choices=range(9), metavar="0..8")
    parser.add_argument(
        "--acceptance",
        type=_shares,
        help="share of steps that keep the first, second, ... draft; a further one is kept half "
        f"as often as the one before. What glm-nano was measured with: {GLM_NANO_ACCEPTANCE}",
    )
    parser.add_argument(
        "--message-us", type=float, default=1e6 * MESSAGE_S, help="one way, see messages.py"
    )
    parser.add_argument(
        "--message-cpu-us",
        type=float,
        default=1e6 * MESSAGE_CPU_S,
        help="of the scheduler's process, for each message",
    )
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--max-plans-in-flight", type=int, choices=(1, 2), default=2)
    parser.add_argument("--scheduling-policy", choices=("fcfs", "priority"), default="fcfs")
    parser.add_argument("--watermark", type=float, default=0.0)
    parser.add_argument("--long-prefill-token-threshold", type=int)
    parser.add_argument("--no-enable-fair-share", action="store_true")
    parser.add_argument(
        "--cost-factor", type=float, default=1.0, help="of the scheduler's measured cost"
    )
    parser.add_argument("--chart", type=Path, help="an SVG or PNG file to draw into")
    parser.add_argument("--policies", action="store_true", help="compare policies instead")
    parser.add_argument(
        "--intervals", action="store_true", help="compare --prefill-schedule-interval instead"
    )
    parser.add_argument(
        "--calibrate", action="store_true", help="hold against the CPU mesh instead"
    )
    arguments = parser.parse_args(argv)
    _complete(parser, arguments)
    return arguments


def _shares(text: str) -> list[float]:
    """Shares that do not grow, separated by commas."""
    shares = [float(part) for part in text.split(",")]
    if not all(0 <= share <= 1 for share in shares) or shares != sorted(shares, reverse=True):
        raise ValueError
    return shares


def _complete(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Fill in what follows from other options; ends the process where they do not fit."""
    replicas, world = arguments.replicas, arguments.world
    if world < 1 or replicas % world:
        parser.error(f"--replicas {replicas} is no multiple of --world {world}")
    own = world * arguments.devices if world > 1 else 16
    arguments.expert_devices = arguments.expert_devices or own
    if world > 1 and arguments.expert_devices != own:
        parser.error(
            f"--expert-devices {arguments.expert_devices}: the experts of --world {world} are "
            f"spread over its {own} devices"
        )
    shares = arguments.acceptance or GLM_NANO_ACCEPTANCE
    if arguments.acceptance and not arguments.drafts:
        parser.error("--acceptance needs --drafts")
    while len(shares) < arguments.drafts:
        shares = [*shares, shares[-1] / 2]
    arguments.acceptance = shares[: arguments.drafts]


def main(argv: list[str] | None = None) -> int:
    """Run what is asked for."""
    arguments = parse(argv)
    if arguments.policies:
        compare(arguments.chart)
        return 0
    if arguments.intervals:
        compare_intervals()
        return 0
    if arguments.calibrate:
        sys.stdout.write(json.dumps(calibrate()) + "\n")
        return 0
    device = Roofline(
        read_sizes(),
        DEVICES[arguments.hardware],
        arguments.scheme,
        num_devices=arguments.devices,
        num_expert_devices=arguments.expert_devices,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        num_drafts=arguments.drafts,
        world_size=arguments.world,
    )
    config = CoreConfig(
        max_plans_in_flight=arguments.max_plans_in_flight,
        policy=arguments.scheduling_policy,
        watermark=arguments.watermark,
        long_prefill_token_threshold=arguments.long_prefill_token_threshold,
        enable_fair_share=not arguments.no_enable_fair_share,
        prefill_schedule_interval=arguments.prefill_schedule_interval,
    )
    gc.freeze()
    world = World(
        config,
        device,
        arguments.replicas,
        arguments.cost_factor,
        arguments.message_us * 1e-6,
        arguments.message_cpu_us * 1e-6,
        world_size=arguments.world,
        acceptance=arguments.acceptance,
    )
    load = Load(rate=arguments.rate, seconds=arguments.seconds, seed=arguments.seed)
    outcome = world.run(TRACES[arguments.trace](load), until_s=20 * arguments.seconds)
    line = {
        "claim": "simulate",
        "trace": arguments.trace,
        "rate": arguments.rate,
        "replicas": arguments.replicas,
        "world": arguments.world,
        "drafts": arguments.drafts,
        "hardware": arguments.hardware,
        "scheme": arguments.scheme,
    }
    sys.stdout.write(json.dumps(line | summarize(outcome, load.seconds, arguments.replicas)) + "\n")
    if arguments.chart:
        draw({arguments.trace: outcome}, arguments.chart)
    return 0


if __name__ == "__main__":
    sys.exit(main())
