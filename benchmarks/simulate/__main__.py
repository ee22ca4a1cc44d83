"""The scheduler under loads that this machine cannot serve: simulated devices, the real core.

    python -m benchmarks.simulate --trace agents --rate 2 --replicas 4 --chart run.svg
    python -m benchmarks.simulate --trace short --rate 2000 --replicas 64 --seconds 10
    python -m benchmarks.simulate --policies                 # the table of docs/scheduling.md
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
from benchmarks.simulate.hardware import DEVICES
from benchmarks.simulate.policies import compare
from benchmarks.simulate.report import summarize
from benchmarks.simulate.sizes import SCHEMES, read_sizes
from benchmarks.simulate.traces import TRACES, Load
from benchmarks.simulate.world import World
from services.scheduler.limits import CoreConfig


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
    parser.add_argument("--expert-devices", type=int, default=16, help="that share the experts")
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
        "--calibrate", action="store_true", help="hold against the CPU mesh instead"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run what is asked for."""
    arguments = parse(argv)
    if arguments.policies:
        compare(arguments.chart)
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
    )
    config = CoreConfig(
        max_plans_in_flight=arguments.max_plans_in_flight,
        policy=arguments.scheduling_policy,
        watermark=arguments.watermark,
        long_prefill_token_threshold=arguments.long_prefill_token_threshold,
        enable_fair_share=not arguments.no_enable_fair_share,
    )
    gc.freeze()
    world = World(config, device, arguments.replicas, arguments.cost_factor)
    load = Load(rate=arguments.rate, seconds=arguments.seconds, seed=arguments.seed)
    outcome = world.run(TRACES[arguments.trace](load), until_s=20 * arguments.seconds)
    line = {
        "claim": "simulate",
        "trace": arguments.trace,
        "rate": arguments.rate,
        "replicas": arguments.replicas,
        "hardware": arguments.hardware,
        "scheme": arguments.scheme,
    }
    sys.stdout.write(json.dumps(line | summarize(outcome, load.seconds, arguments.replicas)) + "\n")
    if arguments.chart:
        draw({arguments.trace: outcome}, arguments.chart)
    return 0


if __name__ == "__main__":
    sys.exit(main())
