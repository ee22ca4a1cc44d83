"""`python -m shared.probe ADDRESS [SERVICE]`: exit 0 when the process there says SERVING.

For health checks of containers, which then need no tool besides the service itself.
"""

import asyncio
import sys
from collections.abc import Sequence

from shared.health import probe


def main(argv: Sequence[str] | None = None) -> int:
    """Ask once, say the answer, return 0 for SERVING, 1 for anything else, 2 for wrong usage."""
    words = list(sys.argv[1:] if argv is None else argv)
    if len(words) not in {1, 2}:
        sys.stderr.write("usage: python -m shared.probe ADDRESS [SERVICE]\n")
        return 2
    try:
        status = asyncio.run(probe(words[0], service="".join(words[1:])))
    except ValueError as error:
        sys.stderr.write(f"{words[0]}: {error}\n")
        return 2
    sys.stdout.write(f"{status}\n")
    return 0 if status == "SERVING" else 1


if __name__ == "__main__":
    raise SystemExit(main())
