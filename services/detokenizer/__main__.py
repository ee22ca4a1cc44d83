"""`python -P -m services.detokenizer`: one detokenizer process."""

import asyncio
import sys

from services.detokenizer.service import DetokenizerService
from services.detokenizer.settings import DetokenizerSettings
from shared.process import run_process


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT; 2 when a setting or the checkpoint is wrong."""
    return run_process(DetokenizerSettings, _serve, argv)


async def _serve(settings: DetokenizerSettings, stop: asyncio.Event) -> None:
    await DetokenizerService(settings).run(stop)


if __name__ == "__main__":
    sys.exit(main())
