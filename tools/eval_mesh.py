"""Starts the mesh with glm-nano and scores it: `make eval`.

Flags before `--` go to `glm-mesh up`, those after it to the evaluation, for example
`python -m tools.eval_mesh --dtype float32 -- --prompts 1000 --skills echo`.

`--scheme w8a8` (or w8a8c8, w4a8c8) quantizes the checkpoint into `.quantized/` and scores both on
the same prompts; a c8 scheme serves the quantized one with 8-bit caches. `--max-loss 1` ends
with 1 if a skill loses more points.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from benchmarks.mesh import running_mesh
from tools.paired import Pairs, pair

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".quantized"
_C8_FLAGS = (
    "--additional-config",
    '{"enable_sparse_li_c8": true, "enable_sparse_sfa_c8": true}',
)


def main(argv: list[str] | None = None) -> int:
    """Serve, evaluate, stop."""
    args = list(sys.argv[1:] if argv is None else argv)
    split = args.index("--") if "--" in args else len(args)
    options, serve_flags = _parser().parse_known_args(args[:split])
    eval_flags = args[split + 1 :]
    if options.scheme is None:
        return score(options.model, serve_flags, eval_flags)
    return compare(options, serve_flags, eval_flags)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "glm-nano")
    parser.add_argument("--scheme", help="quantize by this scheme and compare")
    parser.add_argument("--max-loss", type=float, default=100.0, help="points a skill may lose")
    return parser


def score(model: Path, serve_flags: list[str], eval_flags: list[str]) -> int:
    """Serves one checkpoint and scores it; the exit status of the evaluation."""
    flags = ("--served-model-name", "glm-nano", "--model", str(model), *serve_flags)
    with running_mesh(*flags) as mesh:
        base_url = f"http://127.0.0.1:{mesh.port}/v1"
        command = [sys.executable, "-m", "tools.nano.evaluate", "--base-url", base_url]
        return subprocess.call([*command, *eval_flags])


def compare(options: argparse.Namespace, serve_flags: list[str], eval_flags: list[str]) -> int:
    """Scores a checkpoint before and after quantizing."""
    target = CACHE / f"{options.model.resolve().name}-{options.scheme}"
    words = [str(options.model), str(target), "--scheme", options.scheme, "--overwrite"]
    command = [sys.executable, "-P", "-m", "services.worker.quant", *words]
    if status := subprocess.call([*command, "--log-level", "warning"]):
        return status
    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder) / "before.jsonl", Path(folder) / "after.jsonl"
        c8_flags = _C8_FLAGS if options.scheme.endswith("c8") else ()
        runs = ((options.model, (), before), (target, c8_flags, after))
        for model, more_flags, file in runs:
            flags = [*eval_flags, "--verdicts", str(file)]
            if status := score(model, [*serve_flags, *more_flags], flags):
                return status
        return report(options.scheme, read_verdicts(before), read_verdicts(after), options.max_loss)


Verdicts = dict[str, dict[int, bool]]
"""Skill -> number of the prompt -> whether the answer was right."""


def read_verdicts(file: Path) -> Verdicts:
    """Reads what `tools.nano.evaluate --verdicts` wrote."""
    verdicts: Verdicts = defaultdict(dict)
    for line in file.read_text().splitlines():
        value = json.loads(line)
        verdicts[value["skill"]][value["seed"]] = value["is_right"]
    return verdicts


def report(scheme: str, before: Verdicts, after: Verdicts, max_loss: float) -> int:
    """Prints one JSON line per skill; 1 if one loses more than it may."""
    results: dict[str, Pairs] = {skill: pair(before[skill], after[skill]) for skill in before}
    for skill, pairs in results.items():
        print(json.dumps({"scheme": scheme, "skill": skill} | pairs.as_dict()), flush=True)
    return int(any(-pairs.points > max_loss for pairs in results.values()))


if __name__ == "__main__":
    sys.exit(main())
