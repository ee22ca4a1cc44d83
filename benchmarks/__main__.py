"""Every claim in turn, one JSON line each: `python -m benchmarks [--peer PORT]`."""

import argparse
import subprocess
import sys

CLAIMS = (
    "scheduler_step",
    "block_hashes",
    "output_machine",
    "hop_cost",
    "loading",
    "cold_start",
    "decode_step",
    "int8_decode",
    "memory_bound",
    "step_ahead",
    "drafts",
    "structured_output",
    "sse",
    "serving",
)
RACES = ("sse", "serving")


def main(argv: list[str] | None = None) -> int:
    """Run the claims as processes of their own; the exit code is the number that failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", help="port of a peer that already runs, for the races")
    parser.add_argument("--only", nargs="*", choices=CLAIMS, default=list(CLAIMS))
    args = parser.parse_args(argv)
    failed = 0
    for claim in args.only:
        command = [sys.executable, "-m", f"benchmarks.{claim}"]
        if claim in RACES and args.peer:
            command += ["--peer", args.peer]
        failed += subprocess.call(command) != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
