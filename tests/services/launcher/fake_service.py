"""Stands in for a service: tells its health, ends as it is told. Run as a script."""

import argparse
import os
import signal
import sys
import threading
import time

from shared.health import HealthThread
from shared.parent import die_with_parent


def main() -> int:
    die_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("--health-address", required=True)
    parser.add_argument("--exit-code", type=int, default=None)
    parser.add_argument("--after-s", type=float, default=0.0)
    parser.add_argument("--deaf", action="store_true")
    parser.add_argument("--never-ready", action="store_true")
    parser.add_argument("--order-file", default="")
    parser.add_argument("--exit-2-if", default="", help="a file that is there at the start")
    options = parser.parse_args()
    stop = threading.Event()
    handler = signal.SIG_IGN if options.deaf else lambda *_: stop.set()
    signal.signal(signal.SIGTERM, handler)
    sys.stderr.write(f"x INFO fake fake: started pid {os.getpid()}\n")
    sys.stderr.write("x WARNING fake fake: a warning\n    with a second line\n")
    sys.stderr.flush()
    if options.exit_2_if and os.path.exists(options.exit_2_if):
        return 2
    if options.exit_code is not None:
        time.sleep(options.after_s)
        sys.stderr.write("x ERROR fake fake: last words\n")
        return int(options.exit_code)
    health = HealthThread(address=options.health_address, service="fake")
    health.start()
    health.set_status(not options.never_ready)
    stop.wait()
    if options.order_file:
        with open(options.order_file, "a", encoding="utf-8") as file:
            file.write(f"{options.health_address.rsplit('/', 1)[1].split('.')[0]}\n")
    health.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
