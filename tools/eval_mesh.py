"""Starts the mesh with glm-nano and scores it: `make eval`.

Flags before `--` go to `glm-mesh up`, those after it to the evaluation, for example
`python -m tools.eval_mesh --dtype float32 -- --prompts 1000 --skills echo`.
"""

import subprocess
import sys

from benchmarks.mesh import running_mesh


def main(argv: list[str] | None = None) -> int:
    """Serve, evaluate, stop."""
    args = list(sys.argv[1:] if argv is None else argv)
    split = args.index("--") if "--" in args else len(args)
    serve_flags, eval_flags = args[:split], args[split + 1 :]
    with running_mesh("--served-model-name", "glm-nano", *serve_flags) as mesh:
        base_url = f"http://127.0.0.1:{mesh.port}/v1"
        command = [sys.executable, "-m", "tools.nano.evaluate", "--base-url", base_url]
        return subprocess.call([*command, *eval_flags])


if __name__ == "__main__":
    sys.exit(main())
