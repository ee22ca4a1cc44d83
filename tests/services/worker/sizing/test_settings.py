import pytest

from services.worker.sizing.settings import PlanSettings
from shared.config import parse
from shared.errors import ConfigError


def test_only_the_model_is_required() -> None:
    settings = parse(PlanSettings, ["--model", "models/glm-5.2"])
    assert (settings.hardware, settings.scheme, settings.output) == ("a3", "auto", "table")
    with pytest.raises(ConfigError, match="--model is required"):
        parse(PlanSettings, [])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--hardware", "a4"], "--hardware 'a4'"),
        (["--scheme", "w2a2"], "--scheme 'w2a2'"),
        (["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization '1.5'"),
        (["--max-num-seqs", "0"], "--max-num-seqs '0'"),
        (["--tensor-parallel", "8"], "did you mean --tensor-parallel-size"),
    ],
)
def test_a_wrong_value_is_told_with_its_flag(flags: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(PlanSettings, ["--model", "m", *flags])
