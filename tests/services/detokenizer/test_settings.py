from pathlib import Path

import pytest

from services.detokenizer.settings import DetokenizerSettings
from shared.config import parse
from shared.errors import ConfigError

FLAGS = ["--address", "unix:/tmp/d.sock", "--scheduler-address", "unix:/tmp/s.sock"]


def test_flags_make_settings() -> None:
    settings = parse(
        DetokenizerSettings,
        [*FLAGS, "--model", "models/glm-nano", "--reader-max-pending-bytes", "8192"],
    )
    assert settings.model == Path("models/glm-nano")
    assert settings.reader_limits.max_pending_bytes == 8192
    assert settings.reader_limits.max_stall_s == settings.reader_stall_timeout_s


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ([], "--model"),
        (["--model", "m", "--reader-max-pending-bytes", "1"], "--reader-max-pending-bytes"),
        (["--model", "m", "--max-timeout-s", "0"], "--max-timeout-s"),
        (["--model", "m", "--what", "1"], "--what"),
    ],
)
def test_a_wrong_setting_is_named(extra: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse(DetokenizerSettings, [*FLAGS, *extra])
