"""The prompts that glm-nano is quantized with."""

import json
from pathlib import Path

from tools.nano import calibration
from tools.nano.data import Encoder
from tools.nano.tasks import SKILLS

NANO = Path(__file__).parents[3] / "models" / "glm-nano"


def shipped() -> list[dict[str, object]]:
    return [json.loads(line) for line in (NANO / calibration.FILE).read_text().splitlines()]


def test_the_shipped_file_is_what_the_tool_writes() -> None:
    assert shipped() == [calibration.line(episode) for episode in calibration.conversations()]


def test_the_shipped_file_is_small() -> None:
    assert (NANO / calibration.FILE).stat().st_size < 200_000


def test_every_skill_is_in_it_alike() -> None:
    counts = [episode.skill for episode in calibration.conversations()]
    assert {counts.count(skill) for skill in SKILLS} == {calibration.COUNT // len(SKILLS)}


def test_conversations_are_longer_than_the_selection() -> None:
    encoder = Encoder(NANO)
    lengths = [len(encoder.encode(e)[0]) for e in calibration.conversations()]
    assert max(lengths) > 4 * 128  # index_topk


def test_thinking_is_switched_off_where_the_model_did_not_think() -> None:
    for episode, line in zip(calibration.conversations(), shipped(), strict=True):
        assert ("chat_template_kwargs" in line) is not episode.thinking
