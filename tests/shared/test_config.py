from pathlib import Path
from typing import ClassVar, Literal

import pytest
from pydantic import Field, SecretStr

from shared.config import (
    Addresses,
    ServiceSettings,
    check_address,
    flag_of,
    has_tables,
    names_in_table,
    parse,
    shown,
    unread_variables,
)
from shared.errors import ConfigError


class Settings(ServiceSettings):
    """Settings of a service in this test."""

    service: ClassVar[str] = "scheduler"

    max_num_seqs: int = Field(default=256, gt=0, description="Most sequences in one plan.")
    served_model_name: list[str] = Field(default=[], description="Names of the model.")
    api_key: SecretStr | None = Field(default=None, description="Key that callers must show.")
    dtype: Literal["bfloat16", "float32"] = Field(default="bfloat16", description="Number type.")
    key_file: Path | None = Field(default=None, description="Keys that open the API.")
    is_loud: bool = Field(default=False, description="Whether to shout.")


ADDRESS = ["--address", "unix:/run/x.sock"]


@pytest.fixture(autouse=True)
def _clean_env(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLM_MESH_MAX_NUM_SEQS", "GLM_MESH_SCHEDULER_MAX_NUM_SEQS", "GLM_MESH_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def test_flags_accept_equals_underscores_and_repetition() -> None:
    settings = parse(
        Settings,
        [*ADDRESS, "--max_num_seqs=4", "--served-model-name", "a", "--served-model-name", "b"],
    )
    assert settings.max_num_seqs == 4
    assert settings.served_model_name == ["a", "b"]
    assert settings.log_level == "info"


def test_flag_beats_environment_beats_file_beats_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text('max-num-seqs = 5\ndtype = "float32"\n')
    config = [*ADDRESS, "--config", str(file)]
    assert parse(Settings, config).max_num_seqs == 5
    assert parse(Settings, config).dtype == "float32"
    monkeypatch.setenv("GLM_MESH_MAX_NUM_SEQS", "6")
    assert parse(Settings, config).max_num_seqs == 6
    monkeypatch.setenv("GLM_MESH_SCHEDULER_MAX_NUM_SEQS", "7")
    assert parse(Settings, config).max_num_seqs == 7
    assert parse(Settings, [*config, "--max-num-seqs", "8"]).max_num_seqs == 8


@pytest.mark.parametrize("text", ["a b,c", '["a b,c"]'])
def test_a_list_in_the_environment_is_json_or_its_one_entry(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("GLM_MESH_SERVED_MODEL_NAME", text)
    assert parse(Settings, ADDRESS).served_model_name == ["a b,c"]


def test_json_file_named_by_the_environment_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mesh.json"
    file.write_text('{"address": "h:1"}')
    monkeypatch.setenv("GLM_MESH_CONFIG", str(file))
    assert parse(Settings, []).address == "h:1"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-num-seq", "3"], "unknown option --max-num-seq; did you mean --max-num-seqs?"),
        (["--zzz"], "unknown option --zzz; see --help"),
        ([], "--address is required"),
        ([*ADDRESS, "--max-num-seqs", "0"], "--max-num-seqs '0': Input should be greater than 0"),
        ([*ADDRESS, "--dtype", "half"], "--dtype 'half': .*'bfloat16' or 'float32'"),
        (["--address", "nowhere"], "--address 'nowhere': must be unix:/path or host:port"),
        ([*ADDRESS, "stray"], "stray"),
        ([*ADDRESS, "--max-num-seqs"], "--max-num-seqs"),
        ([*ADDRESS, "--config", "/no/such.toml"], "/no/such.toml: No such file"),
    ],
)
def test_a_mistake_is_named(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        parse(Settings, argv)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "max_num_seq = 1", "unknown setting max_num_seq; did you mean max_num_seqs"),
        ("a.toml", "= 3", "a.toml"),
        ("a.json", "[1]", "must hold a table"),
        ("a.toml", "scheduler = 1\n[worker]", "scheduler must be a table"),
        ("a.toml", "[scheduler]\nmax_num_seq = 1", "unknown setting max_num_seq; did you"),
        ("a.toml", "max_num_seqs = -1", "--max-num-seqs -1 .from .*a.toml.: Input should be"),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        parse(Settings, [*ADDRESS, "--config", str(file)])


def test_in_a_file_with_tables_a_process_reads_its_own_only(tmp_path: Path) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text("port = 1\n[worker]\nother = 1\n[scheduler]\nmax-num-seqs = 7\n")
    assert parse(Settings, [*ADDRESS, "--config", str(file)]).max_num_seqs == 7
    assert has_tables(file)
    file.write_text("[worker]\nother = 1\n")
    assert parse(Settings, [*ADDRESS, "--config", str(file)]).max_num_seqs == 256
    file.write_text("max_num_seqs = 1\n")
    assert not has_tables(file)


def test_malformed_environment_value_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLM_MESH_MAX_NUM_SEQS", "many")
    with pytest.raises(ConfigError, match=r"--max-num-seqs 'many' \(from the env"):
        parse(Settings, ADDRESS)


@pytest.mark.parametrize("name", ["config", "key-file"])
def test_an_empty_path_is_not_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    why = "an empty path; leave it out where none is meant"
    for flags in ([f"--{name}", ""], [f"--{name}="]):
        with pytest.raises(ConfigError, match=f"--{name} '': {why}"):
            parse(Settings, [*ADDRESS, *flags])
    if name != "config":
        file = tmp_path / "mesh.toml"
        file.write_text(f'{name} = ""\n')
        with pytest.raises(ConfigError, match=rf"--{name} '' \(from .*mesh.toml\): {why}"):
            parse(Settings, [*ADDRESS, "--config", str(file)])
    for variable in ("GLM_MESH_", "GLM_MESH_SCHEDULER_"):
        with monkeypatch.context() as patch:
            patch.setenv(variable + name.replace("-", "_").upper(), "")
            with pytest.raises(ConfigError, match=rf"--{name} '' \(from the environment\): {why}"):
                parse(Settings, ADDRESS)


def test_the_names_in_a_table_are_those_of_one_process(tmp_path: Path) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text("[scheduler]\nmax-num-seqs = 1\ndtype = 'x'\n[worker]\nother = 1\n")
    assert names_in_table(file, "scheduler") == ["max-num-seqs", "dtype"]
    assert names_in_table(file, "frontend") == []
    file.write_text("max-num-seqs = 1\n")
    assert names_in_table(file, "scheduler") == []


def test_help_lists_every_flag_with_description_and_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(Settings, ["--help"], prog="glm-mesh scheduler")
    text = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0
    assert text.startswith("usage: glm-mesh scheduler")
    for name, field in Settings.model_fields.items():
        assert flag_of(name) in text
        assert str(field.description) in text
    assert "(default: 256)" in text


def test_secrets_are_blanked_wherever_settings_are_shown() -> None:
    settings = parse(Settings, [*ADDRESS, "--api-key", "hunter2"])
    assert settings.api_key is not None
    assert settings.api_key.get_secret_value() == "hunter2"
    assert shown(settings)["api_key"] == "***"
    assert "hunter2" not in repr(settings)


def test_settings_cannot_change_and_read_nothing_when_built_directly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLM_MESH_MAX_NUM_SEQS", "9")
    monkeypatch.setenv("MAX_NUM_SEQS", "9")
    settings = Settings(address="h:1")
    assert settings.max_num_seqs == 256
    with pytest.raises(ValueError, match="frozen"):
        settings.max_num_seqs = 1  # type: ignore[misc]  # the point of the test


@pytest.mark.parametrize("address", ["unix:rel/x", "h:70000", ":80", "h:", "unix:/" + "x" * 107])
def test_bad_addresses_are_refused(address: str) -> None:
    with pytest.raises(ValueError):
        check_address(address)


class Many(ServiceSettings):
    service: ClassVar[str] = "many"

    peer_address: Addresses = Field(description="Where peers are.")


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (["unix:/a"], ["unix:/a"]),
        (["unix:/a,unix:/b"], ["unix:/a", "unix:/b"]),
        (["unix:/a", "h:1,h:2"], ["unix:/a", "h:1", "h:2"]),
        (["h:1,unix:/a,odd,unix:/b"], ["h:1", "unix:/a,odd", "unix:/b"]),
    ],
)
def test_a_list_of_addresses_is_cut_at_commas_and_repeatable(
    flags: list[str], found: list[str]
) -> None:
    words = [word for flag in flags for word in ("--peer-address", flag)]
    assert parse(Many, [*ADDRESS, *words]).peer_address == found


@pytest.mark.parametrize(
    ("value", "why"),
    [("unix:/a,unix:/a", "twice"), ("unix:/a,h:99999", "host:port"), ("x", "host:port")],
)
def test_a_wrong_list_of_addresses_is_refused_by_name(value: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"--peer-address .*{why}"):
        parse(Many, [*ADDRESS, "--peer-address", value])


def test_a_list_of_addresses_in_the_environment_is_read_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLM_MESH_MANY_PEER_ADDRESS", "unix:/a,h:1")
    assert parse(Many, ADDRESS).peer_address == ["unix:/a", "h:1"]


def test_a_list_of_addresses_is_never_empty() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Many(address="h:1", peer_address=[])


@pytest.mark.parametrize("value", ["x,long", '["x"', '"a"', "[1]", "a b", "", "a\tb", "-x", "--x"])
def test_each_value_of_a_list_is_one_entry_whatever_it_holds(value: str) -> None:
    argv = [*ADDRESS, f"--served-model-name={value}", "--served-model-name", "second"]
    assert parse(Settings, argv).served_model_name == [value, "second"]
    if not value.startswith("--"):
        argv = [*ADDRESS, "--served-model-name", value]
        assert parse(Settings, argv).served_model_name == [value]


@pytest.mark.parametrize("rest", [[], ["--is-loud"]])
def test_a_list_flag_without_a_value_is_named(rest: list[str]) -> None:
    with pytest.raises(ConfigError, match="--served-model-name needs a value"):
        parse(Settings, [*ADDRESS, "--served-model-name", *rest])


@pytest.mark.parametrize(
    ("variable", "advice"),
    [
        ("GLM_MESH_MAX_NUM_SEQ", "; did you mean GLM_MESH_MAX_NUM_SEQS?"),
        ("GLM_MESH_SCHEDULER_MAX_SEQS", "; did you mean GLM_MESH_SCHEDULER_MAX_NUM_SEQS?"),
        ("GLM_MESH_SCHEDULER_COLOUR", ""),
    ],
)
def test_a_variable_that_no_setting_reads_is_told_by_name(variable: str, advice: str) -> None:
    (line,) = unread_variables(Settings, {variable: "1", "PATH": "/bin"})
    assert line == f"{variable} is set, and no setting has that name{advice}"


@pytest.mark.parametrize(
    "variable",
    [
        *("GLM_MESH_MAX_NUM_SEQS", "glm_mesh_scheduler_dtype", "GLM_MESH_WORKER_X"),
        *("GLM_MESH_PORT", "GLM_MESH_SCHEDULER_COUNT"),
    ],
)
def test_variables_that_are_read_here_or_elsewhere_are_not_told(variable: str) -> None:
    assert not list(unread_variables(Settings, {variable: "1"}))
