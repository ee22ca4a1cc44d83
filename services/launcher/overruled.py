"""Settings of services that `up` decides itself: whoever gives them elsewhere is told.

A flag beats a variable and a file, so what is on the command line of a service that `up` starts
has no effect anywhere else.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from services.launcher.commands import Command
from services.launcher.settings import UpSettings
from shared.config import ENV_PREFIX, flag_of, names_in_table


def overruled(
    commands: Sequence[Command], variables: Mapping[str, str], config: Path | None
) -> Iterator[str]:
    """A line for each setting in the environment or the file that a service never sees.

    Args:
        commands: What is started.
        variables: The environment of `up`.
        config: Its settings file.
    """
    given = _given_flags(commands)
    for variable in sorted(variables):
        if variable.upper().startswith(ENV_PREFIX):
            yield from _overruled_variable(variable, given)
    own = {command.kind: command.environment for command in commands}
    for kind, environment in own.items():
        yield from _replaced_variables(kind, environment, variables)
    if config is None:
        return
    for kind, flags in given.items():
        for name in names_in_table(config, kind):
            flag = flag_of(name)
            if flag in flags:
                yield f"{name} of [{kind}] in {config}: no effect: up itself gives {flag}"


def _given_flags(commands: Sequence[Command]) -> dict[str, set[str]]:
    """Service -> flags that all of its processes get."""
    given: dict[str, set[str]] = {}
    for command in commands:
        words = {word.partition("=")[0] for word in command.argv if word.startswith("--")}
        flags = words | {"--" + word.removeprefix("--no-").removeprefix("--") for word in words}
        given[command.kind] = given.get(command.kind, flags) & flags
    return given


def _overruled_variable(variable: str, given: Mapping[str, set[str]]) -> Iterator[str]:
    name = variable.upper().removeprefix(ENV_PREFIX).lower()
    if name in UpSettings.model_fields:
        return  # up reads it, and what it gives comes from there
    for kind, flags in given.items():
        for own in {name, name.removeprefix(f"{kind}_")}:
            flag = flag_of(own)
            if flag in flags:
                yield f"{variable}: no effect on the {kind}: up itself gives {flag}"


def _replaced_variables(
    kind: str, environment: Mapping[str, str], variables: Mapping[str, str]
) -> Iterator[str]:
    """Variables of a service that `up` writes, such as the keys that it was given."""
    for variable in sorted(variables):
        is_own = variable.upper().startswith(f"{ENV_PREFIX}{kind}_".upper())
        if is_own and environment.get(variable, variables[variable]) != variables[variable]:
            yield f"{variable}: no effect on the {kind}: up itself gives it"
