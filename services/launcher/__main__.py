"""The `glm-mesh` command.

`up` runs the whole mesh; the name of a service or tool replaces this process by it alone. No
service is imported here, and what takes time to import is imported by `main`: Ctrl-C ends the
command without a traceback from its first moment on.
"""

import os
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Final

EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130
"""What a shell makes of a command that SIGINT ended."""
EXIT_PIPE: Final = 141
"""The same of SIGPIPE."""

# Commands that are parts of a service's package.
TOOLS: Final = {"plan": "worker.sizing", "quantize": "worker.quant"}

USAGE: Final = """\
usage: glm-mesh COMMAND [options]

  up            run the whole mesh on this machine and serve the OpenAI API
  frontend      run this service alone
  detokenizer   run this service alone
  scheduler     run this service alone
  worker        run this service alone
  status        show the processes and replicas of a running mesh
  plan          size a deployment without weights or devices: what its memory goes to, what fits
  quantize      turn a float checkpoint into a quantized one
  version       print the version

`glm-mesh COMMAND --help` lists the options of a command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code."""
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stderr.write("glm-mesh: interrupted\n")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # What reads the output has enough; at exit there is nothing to flush into.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE


def _run(words: Sequence[str]) -> int:
    # See above.
    from services.launcher.run_dir import SERVICES  # noqa: PLC0415
    from shared.errors import ConfigError  # noqa: PLC0415

    command = words[0] if words else ""
    if command in {"-h", "--help", "help"}:
        sys.stdout.write(USAGE)
        return 0
    if command in {"version", "--version"}:
        sys.stdout.write(f"glm-mesh {metadata.version('glm-mesh')}\n")
        return 0
    try:
        if command in {"up", "status"}:
            return _own(command)(words[1:])
        if command in SERVICES or command in TOOLS:
            become(TOOLS.get(command, command), words[1:])
    except ConfigError as error:
        sys.stderr.write(f"glm-mesh: {error}\n")
        return EXIT_USAGE
    if command:
        sys.stderr.write(f"glm-mesh: unknown command {command}\n")
    sys.stderr.write(USAGE)
    return EXIT_USAGE


def _own(command: str) -> Callable[[Sequence[str]], int]:
    """What runs in this process; imported only when it is asked for."""
    if command == "status":
        from services.launcher.status.command import run_status  # noqa: PLC0415

        return run_status
    from services.launcher.up import run_up  # noqa: PLC0415  # see above

    return run_up


def become(service: str, flags: Sequence[str]) -> None:
    """Replace this process by the service or tool; returns never."""
    from services.launcher.commands import (  # noqa: PLC0415  # see above
        GRPC_SWITCHES,
        GRPC_VARIABLE,
        module_command,
    )

    program = [*module_command(service), *flags]
    sys.stdout.flush()
    os.execve(program[0], program, {GRPC_VARIABLE: GRPC_SWITCHES, **os.environ})


if __name__ == "__main__":
    sys.exit(main())
