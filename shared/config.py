"""Settings of one process: one typed, frozen model filled from flags, environment and a file.

Precedence: flag, then `GLM_MESH_<SERVICE>_<NAME>`, then `GLM_MESH_<NAME>`, then the file named by
`--config` (TOML or JSON), then the default. A file without tables is one process's own; in a file
with tables each process reads the table of its name ([up], [scheduler], ...) and nothing else.
Flags have vLLM's names where vLLM has the flag; dashes and underscores mean the same. Every mistake
is a `ConfigError` that names the flag, the value and where it came from; nothing is ignored.
"""

import difflib
import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, TypeVar, get_args, get_origin

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from shared.errors import ConfigError
from shared.log import LogLevel

ENV_PREFIX: Final = "GLM_MESH_"
_SERVICE_PREFIXES: Final = ("UP_", "FRONTEND_", "DETOKENIZER_", "SCHEDULER_", "WORKER_")
# Settings of one service that begin with the name of another.
_NAMED_AFTER_OTHERS: Final = frozenset(
    {"WORKER_ADDRESS", "WORKER_GRACE_S", "SCHEDULER_COUNT", "DETOKENIZER_COUNT"}
)
_FROM_ENV: Final = " (from the environment)"
# sockaddr_un holds 108 bytes with the closing zero.
MAX_SOCKET_PATH_BYTES: Final = 107


def check_address(address: str) -> str:
    """Accept `unix:/absolute/path` and `host:port`; ValueError for anything else."""
    scheme, _, path = address.partition(":")
    if scheme == "unix":
        if not path.startswith("/"):
            raise ValueError("the path after unix: must be absolute")
        if len(path.encode()) > MAX_SOCKET_PATH_BYTES:
            raise ValueError(f"a socket path holds at most {MAX_SOCKET_PATH_BYTES} bytes")
        return address
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError("must be unix:/path or host:port")
    return address


Address = Annotated[str, AfterValidator(check_address)]
# A comma before what looks like an address; any other one belongs to a path.
_BETWEEN_ADDRESSES: Final = re.compile(r",(?=unix:/|[^,/]+:\d+(?:,|$))")


def split_addresses(value: object) -> object:
    """One address, `a,b`, or a list of such entries, as one list."""
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        return entries
    return [address for entry in entries for address in _BETWEEN_ADDRESSES.split(entry)]


def check_distinct(addresses: list[str]) -> list[str]:
    """ValueError when an address stands there twice."""
    for number, address in enumerate(addresses):
        if address in addresses[:number]:
            raise ValueError(f"{address} stands there twice")
    return addresses


Addresses = Annotated[
    list[Address],
    BeforeValidator(split_addresses),
    Field(min_length=1),
    AfterValidator(check_distinct),
]


class ProcessSettings(BaseSettings):
    """What every process is told.

    Built directly (in tests) it reads nothing from outside; `parse` does.
    """

    model_config = SettingsConfigDict(frozen=True, extra="forbid", protected_namespaces=())
    service: ClassVar[str] = ""

    config: Path | None = Field(
        default=None, description="TOML or JSON file with settings; flags and environment win."
    )
    log_level: LogLevel = Field(default="info", description="Least level of log lines.")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Values come from `parse` alone, so that the order of sources is in one place."""
        return (init_settings,)


class ServiceSettings(ProcessSettings):
    """What each of the four services is told; each adds its own fields and sets `service`."""

    address: Address = Field(description="gRPC address of this service, unix:/path or host:port.")
    health_address: Address | None = Field(
        default=None, description="Address of grpc.health.v1; none when not given."
    )
    admin_address: Address | None = Field(
        default=None, description="Address of AdminService and reflection; none when not given."
    )


SettingsT = TypeVar("SettingsT", bound=ProcessSettings)


def parse(settings_class: type[SettingsT], argv: Sequence[str], *, prog: str = "") -> SettingsT:
    """Build the settings of a process.

    Args:
        settings_class: Its `service` names env keys and file table.
        argv: Flags without the program's name. `--help` prints every flag and exits with 0.
        prog: Program name in the help text.

    Raises:
        ConfigError: A flag is unknown, a value is wrong or a required one is missing.
    """
    flags = [_with_dashes(word) for word in argv]
    _refuse_unknown_flags(settings_class, flags)
    rest, lists = _take_lists(settings_class, flags)
    flag_values = _read_flags(settings_class, rest, prog or f"glm-mesh {settings_class.service}")
    flag_values |= lists
    env_values = _read_env(settings_class)
    path = {**env_values, **flag_values}.get("config")
    if path == "":
        raise ConfigError(_no_path("config", _FROM_ENV if "config" not in flag_values else ""))
    file_values = _read_file(settings_class, str(path)) if path else {}
    merged = {**file_values, **env_values, **flag_values}
    origins = {name: f" (from {path})" for name in file_values}
    origins |= dict.fromkeys(env_values, _FROM_ENV)
    origins |= dict.fromkeys(flag_values, "")
    for name, value in merged.items():
        if value == "" and _mentions(settings_class.model_fields[name].annotation, Path):
            raise ConfigError(_no_path(name, origins[name]))
    try:
        return settings_class(**merged)
    except ValidationError as error:
        raise ConfigError(_explain(settings_class, error, origins)) from None


def unread_variables(
    settings_class: type[ProcessSettings], variables: Mapping[str, str]
) -> Iterator[str]:
    """A line for each `GLM_MESH_*` variable that is meant for this process and not read.

    Other processes read other variables: one without this process's name in it is only told if
    it resembles one of this process's settings.
    """
    known = sorted(name.upper() for name in settings_class.model_fields)
    own = f"{settings_class.service}_".upper()
    for variable in sorted(variables):
        name = variable.upper()
        if not name.startswith(ENV_PREFIX):
            continue
        name = name.removeprefix(ENV_PREFIX)
        is_own = len(own) > 1 and name.startswith(own)
        bare = name.removeprefix(own) if is_own else name
        if bare in known or name in known or name in _NAMED_AFTER_OTHERS:
            continue
        if not is_own and name.startswith(_SERVICE_PREFIXES):
            continue
        close = difflib.get_close_matches(bare, known, n=1, cutoff=0.6 if is_own else 0.93)
        if is_own or close:
            right = variable[: len(variable) - len(bare)] + "".join(close)
            advice = f"; did you mean {right}?" if close else ""
            yield f"{variable} is set, and no setting has that name{advice}"


def flag_of(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def shown(settings: ProcessSettings) -> dict[str, str]:
    """All settings as text for operators, secrets blanked."""
    return {
        name: "***" if _is_secret(type(settings), name) else str(getattr(settings, name))
        for name in type(settings).model_fields
    }


def _with_dashes(word: str) -> str:
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value


def _take_lists(
    settings_class: type[ProcessSettings], flags: Sequence[str]
) -> tuple[list[str], dict[str, list[str]]]:
    """The flags without those of lists, and each list's values as they were given.

    The library would cut a value at commas: a short piece of an API key would open the API.
    """
    names = {
        flag_of(name): name
        for name, field in settings_class.model_fields.items()
        if get_origin(field.annotation) is list
    }
    rest: list[str] = []
    lists: dict[str, list[str]] = {}
    words = iter(flags)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag not in names:
            rest.append(word)
            continue
        entry = value if equals else next(words, "--")
        if not equals and entry.startswith("--"):
            raise ConfigError(f"{flag} needs a value")
        lists.setdefault(names[flag], []).append(entry)
    return rest, lists


def _refuse_unknown_flags(settings_class: type[ProcessSettings], flags: Sequence[str]) -> None:
    known = {flag_of(name) for name in settings_class.model_fields} | {"--help"}
    negations = {
        "--no-" + name.replace("_", "-")
        for name, field in settings_class.model_fields.items()
        if field.annotation is bool
    }
    for word in flags:
        flag = word.partition("=")[0]
        if flag.startswith("--") and flag not in known | negations:
            raise ConfigError(f"unknown option {flag}{_nearest(flag, sorted(known))}")


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3)
    return f"; did you mean {' or '.join(close)}?" if close else "; see --help"


def _read_flags(
    settings_class: type[ProcessSettings], flags: Sequence[str], prog: str
) -> dict[str, Any]:
    try:
        source: CliSettingsSource[Any] = CliSettingsSource(
            settings_class,
            cli_prog_name=prog,
            cli_parse_args=list(flags),
            cli_kebab_case=True,
            cli_exit_on_error=False,
            cli_implicit_flags=True,
            cli_hide_none_type=True,
            cli_avoid_json=True,
            cli_enforce_required=False,
        )
        return dict(source())
    except SystemExit:  # --help was printed, without its last line break
        sys.stdout.write("\n")
        raise
    except SettingsError as error:
        raise ConfigError(str(error).removeprefix("error parsing CLI: ")) from None


class _EnvSource(EnvSettingsSource):
    """Reads variables; a list may be JSON or its one entry as it is."""

    def decode_complex_value(
        self,
        field_name: str,
        field: FieldInfo,
        value: Any,  # noqa: ANN401  # the library's signature
    ) -> Any:  # noqa: ANN401  # the library's signature
        """JSON where it looks like JSON, else a list of one."""
        if get_origin(field.annotation) is list and not str(value).lstrip().startswith("["):
            return [value]
        return super().decode_complex_value(field_name, field, value)


def _read_env(settings_class: type[ProcessSettings]) -> dict[str, Any]:
    service = settings_class.service
    prefixes = [ENV_PREFIX] + ([f"{ENV_PREFIX}{service.upper()}_"] if service else [])
    values: dict[str, Any] = {}
    for prefix in prefixes:
        try:
            values |= _EnvSource(settings_class, env_prefix=prefix, case_sensitive=False)()
        except SettingsError as error:
            raise ConfigError(f"environment: {error}") from None
    return values


def _read_file(settings_class: type[ProcessSettings], path: str) -> dict[str, Any]:
    content = _load_file(path)
    service = settings_class.service
    own = _table(content, path, service) if _has_tables(content) else content
    known = list(settings_class.model_fields)
    values: dict[str, Any] = {}
    for key, value in own.items():
        name = key.replace("-", "_")
        if name not in known:
            raise ConfigError(f"{path}: unknown setting {key}{_nearest(name, known)}")
        values[name] = value
    return values


def _table(content: Mapping[str, Any], path: str, service: str) -> Mapping[str, Any]:
    own = content.get(service, {})
    if not isinstance(own, Mapping):
        raise ConfigError(f"--config: {path}: {service} must be a table")
    return own


def names_in_table(path: Path, service: str) -> list[str]:
    """Settings that a file with tables has for one process, as they are written there."""
    content = _load_file(str(path))
    return list(_table(content, str(path), service)) if _has_tables(content) else []


def has_tables(path: Path) -> bool:
    """Whether a settings file is meant for several processes; ConfigError if it cannot be read."""
    return _has_tables(_load_file(str(path)))


def _has_tables(content: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Mapping) for value in content.values())


def _load_file(path: str) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
        content = json.loads(text) if path.endswith(".json") else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"--config: {path}: {error.strerror}") from None
    except ValueError as error:  # both decoders' errors and broken UTF-8
        raise ConfigError(f"--config: {path}: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"--config: {path}: the file must hold a table of settings")
    return content


def _explain(
    settings_class: type[ProcessSettings], error: ValidationError, origins: Mapping[str, str]
) -> str:
    lines = []
    for problem in error.errors():
        name = str(problem["loc"][0]) if problem["loc"] else ""
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "missing":
            lines.append(f"{flag_of(name)} is required")
        elif not name or _is_secret(settings_class, name):
            lines.append(f"{flag_of(name)}: {message}" if name else message)
        else:
            origin = origins.get(name, "")
            lines.append(f"{flag_of(name)} {problem['input']!r}{origin}: {message}")
    return "; ".join(lines)


def _no_path(name: str, origin: str) -> str:
    """Of an empty path, which would be the working directory."""
    return f"{flag_of(name)} ''{origin}: an empty path; leave it out where none is meant"


def _is_secret(settings_class: type[ProcessSettings], name: str) -> bool:
    field = settings_class.model_fields.get(name)
    return field is not None and _mentions(field.annotation, SecretStr)


def _mentions(annotation: object, kind: type) -> bool:
    if get_origin(annotation) is not None:
        return any(_mentions(part, kind) for part in get_args(annotation))
    return annotation is kind
