"""Refuses changes of protos/glm/v1 that break callers of the last tagged release.

The contracts of a release are committed as `protos/released.binpb`; until the first tag there is
none and nothing is frozen. `--freeze` writes it, as a step of making a release.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RELEASED = ROOT / "protos" / "released.binpb"
BUF = str(Path(sys.executable).parent / "buf")


def main() -> int:
    """Run buf against the released descriptor."""
    if "--freeze" in sys.argv[1:]:
        return subprocess.call([BUF, "build", "-o", str(RELEASED)], cwd=ROOT)
    if RELEASED.exists():
        return subprocess.call([BUF, "breaking", "--against", str(RELEASED)], cwd=ROOT)
    tags = subprocess.run(
        ["git", "tag", "--list", "v*"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    if tags:
        sys.stderr.write(
            f"{tags[-1]} is tagged but {RELEASED.name} is missing: run with --freeze\n"
        )
        return 1
    sys.stdout.write("protos: no release yet, nothing is frozen\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
