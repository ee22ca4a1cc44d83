from pathlib import Path

import pytest

from services.detokenizer.placement import PlacementRules
from services.detokenizer.schedulers import ResumeLimits
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


def test_several_schedulers_and_what_is_done_about_lost_ones() -> None:
    more = ["--scheduler-address", "unix:/a,h:1", "--model", "m", "--placement-blocks", "8"]
    more += ["--placement-skew", "2", "--resume-timeout-s", "0", "--max-resumptions", "1"]
    settings = parse(DetokenizerSettings, [*FLAGS, *more, "--silence-timeout-s", "9"])
    assert settings.scheduler_address == ["unix:/tmp/s.sock", "unix:/a", "h:1"]
    assert settings.placement_rules == PlacementRules(num_blocks=8, skew=2.0)
    assert settings.resume_limits == ResumeLimits(wait_s=0.0, max_losses=1, silence_s=9.0)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ([], "--model"),
        (["--model", "m", "--reader-max-pending-bytes", "1"], "--reader-max-pending-bytes"),
        (["--model", "m", "--max-timeout-s", "0"], "--max-timeout-s"),
        (["--model", "m", "--what", "1"], "--what"),
        (["--model", "m", "--placement-skew", "0.9"], "--placement-skew"),
        (["--model", "m", "--silence-timeout-s", "1"], "--silence-timeout-s"),
        (["--model", "m", "--scheduler-address", "unix:/tmp/s.sock"], "twice"),
    ],
)
def test_a_wrong_setting_is_named(extra: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse(DetokenizerSettings, [*FLAGS, *extra])
