"""Every command of the GLM-5.2 deployment guide, and what becomes of it today.

`expected.json` lists the options that are refused because their feature is not built, those that
are switched off or warned about as upstream does, and those without effect. A feature that gets
built shortens the lists.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from services.launcher.options.conflicts.table import CONFLICTS
from services.launcher.options.deployment import Deployment
from services.launcher.options.idle import IDLE
from services.launcher.options.judge import judge
from services.launcher.options.rules import Outcome
from services.launcher.options.start import read_start
from services.launcher.options.unbuilt import UNBUILT
from shared.errors import ConfigError
from tests.services.launcher.options.cases import W4A8, W8A8, read
from tests.services.launcher.options.guide import DEPLOYMENTS, NAMES, read_script

EXPECTED: dict[str, dict[str, list[str]]] = json.loads((DEPLOYMENTS / "expected.json").read_text())
# Of the weights that the guide names for the section.
MODELS = {
    name: W4A8 if name.startswith(("5.1.1", "5.1.2", "5.2.1", "5.2.2")) else W8A8 for name in NAMES
}


def asked_by(name: str) -> tuple[Deployment, list[str]]:
    script = read_script(name)
    asked, problems, lines = read(script.words, script.variables, MODELS[name])
    assert not problems
    return asked, lines


def outcome(name: str) -> dict[str, Any]:
    """What `expected.json` says of a script."""
    asked, _ = asked_by(name)
    left = judge(asked).deployment

    def keys(outcome: Outcome, of: Deployment) -> list[str]:
        return [rule.key for rule in CONFLICTS if rule.outcome is outcome and rule.holds(of)]

    return {
        "in_conflict": keys(Outcome.REFUSE, asked),
        "switched_off": keys(Outcome.SWITCH_OFF, asked),
        "warned": keys(Outcome.WARN, left),
        "not_built": [rule.name for rule in UNBUILT if rule.is_asked(left)],
        "no_effect": [
            name for rule in IDLE if rule.told(left) for name in rule.names if left.is_asked(name)
        ],
    }


def test_all_eighteen_scripts_are_there() -> None:
    assert len(NAMES) == 18
    assert sorted(EXPECTED) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_each_command_comes_out_as_listed(name: str) -> None:
    assert outcome(name) == EXPECTED[name]


@pytest.mark.parametrize("name", NAMES)
def test_no_command_is_in_conflict_with_itself(name: str) -> None:
    assert not EXPECTED[name]["in_conflict"]


@pytest.mark.parametrize("name", NAMES)
def test_what_each_command_says_is_read(name: str) -> None:
    asked, _ = asked_by(name)
    script = read_script(name)
    assert asked.flags.seed == 1024
    assert asked.flags.quantization == "ascend"
    words = script.words
    sizes = {
        "tensor_parallel_size": "--tensor-parallel-size",
        "data_parallel_size": "--data-parallel-size",
        "decode_context_parallel_size": "--decode-context-parallel-size",
    }
    for field, flag in sizes.items():
        said = int(words[words.index(flag) + 1]) if flag in words else 1
        assert asked.value(field) == said
    drafts = json.loads(words[words.index("--speculative-config") + 1])
    assert asked.num_drafts == drafts["num_speculative_tokens"]


def test_a_start_tells_all_of_a_command_at_once_a_line_each(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 64, "index_topk": 8}))
    (tmp_path / "quant_model_description.json").write_text('{"x.weight": "W8A8_DYNAMIC"}')
    script = read_script("5.2.3-prefill1")
    words = ["--model", str(tmp_path), *script.words[1:]]
    with pytest.raises(ConfigError) as caught:
        read_start(words, script.variables)
    first, *lines = str(caught.value).splitlines()
    assert first == f"{len(lines)} options are wrong or not served:"
    for path in EXPECTED["5.2.3-prefill1"]["not_built"]:
        flag = "--" + path.split(".")[0].replace("_", "-")
        key = path.split(".")[-1] if "." in path else ""
        assert any(line.strip().startswith(flag) and key in line for line in lines), path
