import socket

import pytest

from services.frontend.http_server import bind
from services.launcher.up import base_url, claim_port, run_up
from shared.errors import ConfigError


def test_a_taken_port_is_named_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port} of 127.0.0.1: .*in use"):
            claim_port("127.0.0.1", port)
        with pytest.raises(ConfigError, match="in use"):
            run_up(["--port", str(port)])


def test_port_zero_takes_a_free_one_and_keeps_it_for_the_frontend() -> None:
    with claim_port("127.0.0.1", 0) as claim:
        port = claim.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        for _ in range(2):  # a frontend that is started again
            with bind("127.0.0.1", port):
                socket.create_connection(("127.0.0.1", port)).close()


def test_an_unknown_host_is_named() -> None:
    with pytest.raises(ConfigError, match="--host not-a-host"):
        claim_port("not-a-host.invalid", 0)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8"),
        ("0.0.0.0", "http://127.0.0.1:8"),
        ("::", "http://[::1]:8"),
        ("::1", "http://[::1]:8"),
        ("box", "http://box:8"),
    ],
)
def test_the_url_can_be_opened(host: str, url: str) -> None:
    assert base_url(host, 8) == url


def test_help_names_the_options_of_vllm_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_up(["--help"])
    out = capsys.readouterr().out
    assert "--kv-cache-memory-bytes" in out
    assert "--tensor-parallel-size" in out
    assert "docs/options.md" in out


def test_what_has_no_effect_is_told_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def give_up(host: str, port: int) -> socket.socket:
        raise ConfigError(f"{host} {port}")

    monkeypatch.setattr("services.launcher.up.claim_port", give_up)
    with pytest.raises(ConfigError):
        run_up(["--trust-remote-code"])
    err = capsys.readouterr().err
    assert err == (
        "glm-mesh: note: --trust-remote-code: no effect: no code is taken from a checkpoint\n"
    )
