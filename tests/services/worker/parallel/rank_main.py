"""One rank of the tests: runs the cases it is told, one after the other, until its input ends.

`python -m tests.services.worker.parallel.rank_main RANK`: a JSON object per line comes in, one with
the place of the results, or what went wrong, goes out.
"""

import importlib
import json
import sys
import traceback

import torch


def main() -> None:
    torch.set_num_threads(1)
    rank = int(sys.argv[1])
    answers = sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        order = json.loads(line)
        module, _, name = order["case"].partition(":")
        try:
            case = getattr(importlib.import_module(module), name)
            result = case(rank, order["rendezvous"], **order["arguments"])
            torch.save(result, order["results"])
            answer = {"error": ""}
        except BaseException:  # noqa: BLE001  # the test tells it
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
