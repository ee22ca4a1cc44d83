"""Fails when `services`, `shared` or `protos` do not resolve into this checkout."""

import importlib.util
import sys
from pathlib import Path


def main() -> int:
    """Print the first package that comes from elsewhere; 0 when none does."""
    root = Path(__file__).resolve().parent.parent
    for name in ("services", "shared", "protos"):
        spec = importlib.util.find_spec(name)
        found = Path(spec.origin).resolve() if spec and spec.origin else None
        if found is None or root not in found.parents:
            sys.stderr.write(f"package {name!r} resolves to {found}, not into {root}\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
