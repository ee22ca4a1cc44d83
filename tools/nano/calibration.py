"""Writes the prompts that glm-nano is quantized with: whole conversations of its training words.

    python -m tools.nano.calibration models/glm-nano

`glm-mesh quantize` takes the file by itself. None of its words is in the evaluation.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

from tools.nano.episode import Episode
from tools.nano.evaluate import wire_messages
from tools.nano.tasks import SKILLS, make_episode

FILE = "calibration.jsonl"
COUNT = 120
SEED = "calibration"
LINES = (20, 110)
"""Lines of a look-up."""


def conversations(count: int = COUNT) -> list[Episode]:
    """Draws conversations of all skills in turn."""
    rng = random.Random(SEED)
    return [
        make_episode(skill, rng, "train", size=rng.randint(*LINES) if skill == "lookup" else None)
        for skill in (SKILLS[index % len(SKILLS)] for index in range(count))
    ]


def line(episode: Episode) -> dict[str, Any]:
    """Returns a conversation as a line of the file."""
    value: dict[str, Any] = {"messages": wire_messages(episode.messages)}
    if episode.tools:
        value["tools"] = episode.tools
    if not episode.thinking:
        value["chat_template_kwargs"] = {"enable_thinking": False}
    return value


def main() -> None:
    """Entry point."""
    path = Path(sys.argv[1]) / FILE
    lines = [json.dumps(line(episode), ensure_ascii=False) for episode in conversations()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
