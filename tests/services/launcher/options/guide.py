"""The deployments of the GLM-5.2 guide, read from the scripts in tests/data/deployments."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Final

DEPLOYMENTS: Final = Path(__file__).resolve().parents[3] / "data" / "deployments"
NAMES: Final = tuple(sorted(path.stem for path in DEPLOYMENTS.glob("*.sh")))
_ASSIGNMENT: Final = re.compile(r"(export )?(\w+)=(.*)")
_VARIABLE: Final = re.compile(r"\$\{?(\w+)\}?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One script: the words after `vllm serve`, and what it exports."""

    words: tuple[str, ...]
    variables: dict[str, str]


def read_script(name: str) -> Script:
    """Do what the shell does with a script, as far as these scripts go."""
    local: dict[str, str] = {}
    exported: dict[str, str] = {}
    lines = (DEPLOYMENTS / f"{name}.sh").read_text().splitlines()
    for number, line in enumerate(lines):
        if line.startswith("# arguments:"):
            values = line.partition(":")[2].split()
            local |= {str(place): value for place, value in enumerate(values, start=1)}
        elif found := _ASSIGNMENT.match(line):
            value = shlex.split(_filled(found[3], local))[0]
            local[found[2]] = value
            if found[1]:
                exported[found[2]] = value
        elif line.startswith("vllm serve "):
            command = _filled("\n".join(lines[number:]).replace("\\\n", " "), local)
            return Script(words=tuple(shlex.split(command)[2:]), variables=exported)
    raise AssertionError(f"{name}: no vllm serve")


def _filled(text: str, variables: dict[str, str]) -> str:
    return _VARIABLE.sub(lambda found: variables.get(found[1], ""), text)
