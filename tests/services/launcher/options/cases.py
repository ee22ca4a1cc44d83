"""Deployments for tests, written as command lines with variables before them."""

import dataclasses
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from services.launcher.options.build import build
from services.launcher.options.command_line import read_command_line
from services.launcher.options.deployment import Deployment, named
from services.launcher.options.environment import read_environment
from services.launcher.options.facts import ModelFacts
from services.launcher.options.judge import Verdict, judge
from services.launcher.options.rules import Conflict, Outcome
from services.launcher.settings import UpSettings
from shared.config import parse

# config.json of GLM-5.2, and of glm-nano.
GLM: Final = ModelFacts(
    num_attention_heads=64,
    num_hidden_layers=78,
    num_nextn_predict_layers=1,
    n_routed_experts=256,
    index_topk=2048,
    kv_lora_rank=512,
    hidden_size=6144,
    moe_intermediate_size=2048,
    max_position_embeddings=1048576,
    is_known=True,
)
NANO: Final = ModelFacts(
    num_attention_heads=4,
    num_hidden_layers=5,
    num_nextn_predict_layers=1,
    n_routed_experts=8,
    index_topk=128,
    kv_lora_rank=512,
    hidden_size=192,
    moe_intermediate_size=64,
    max_position_embeddings=8192,
    is_known=True,
)
W8A8: Final = dataclasses.replace(
    GLM, quant_types=frozenset({"W8A8", "W8A8_DYNAMIC"}), has_quant_description=True
)
W4A8: Final = dataclasses.replace(W8A8, quant_types=frozenset({"W8A8_DYNAMIC", "W4A8_DYNAMIC"}))
DENSE: Final = dataclasses.replace(
    GLM, index_topk=None, n_routed_experts=None, num_nextn_predict_layers=None
)

PREFILL: Final = {"kv_connector": "MooncakeConnectorV1", "kv_role": "kv_producer"}
DECODE: Final = {"kv_connector": "MooncakeConnectorV1", "kv_role": "kv_consumer"}
BOTH: Final = {"kv_connector": "MooncakeConnectorV1", "kv_role": "kv_both"}
STORE: Final = {"kv_connector": "AscendStoreConnector", "kv_role": "kv_consumer"}
MULTI: Final = {"kv_connector": "MultiConnector", "kv_role": "kv_consumer"}


def extra(**keys: object) -> str:
    """`--additional-config`."""
    return f"--additional-config '{json.dumps(keys)}'"


def transfer(config: Mapping[str, object]) -> str:
    """`--kv-transfer-config`."""
    return f"--kv-transfer-config '{json.dumps(config)}'"


def drafts(number: int, **keys: object) -> str:
    """`--speculative-config` as the guide writes it."""
    config = {"num_speculative_tokens": number, "method": "deepseek_mtp", **keys}
    return f"--speculative-config '{json.dumps(config)}'"


def graphs(mode: str = "FULL_DECODE_ONLY", sizes: Sequence[int] | None = None) -> str:
    """`--compilation-config` as the guide writes it."""
    config = {"cudagraph_mode": mode} | ({"cudagraph_capture_sizes": sizes} if sizes else {})
    return f"--compilation-config '{json.dumps(config)}'"


def join(*parts: str) -> str:
    """Parts of a command line as one."""
    return " ".join(parts)


def split(text: str) -> tuple[list[str], dict[str, str]]:
    """`A=1 --flag 2` as words and variables."""
    words = shlex.split(text)
    variables: dict[str, str] = {}
    while words and not words[0].startswith("-"):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    return words, variables


def deployment(text: str, model: ModelFacts = GLM) -> Deployment:
    """What a command line asks for; it must have no mistake."""
    words, variables = split(text)
    asked, problems, _ = read(words, variables, model)
    assert not problems, problems
    return asked


def read(
    words: Iterable[str], variables: Mapping[str, str], model: ModelFacts
) -> tuple[Deployment, list[str], list[str]]:
    """Deployment, problems and lines of a command line whose checkpoint is known by its facts."""
    line = read_command_line(list(words))
    built = build(line.values, variables)
    environment, wrong = read_environment(variables)
    rest = list(line.rest)
    if "--model" in rest:
        place = rest.index("--model")
        del rest[place : place + 2]
    asked = Deployment(
        flags=built.flags,
        settings=parse(UpSettings, rest),
        environment=environment,
        model=model,
        origins=built.origins,
    )
    return asked, [*line.problems, *built.problems, *wrong], [*line.lines, *built.lines]


def verdict(text: str, model: ModelFacts = GLM) -> Verdict:
    """The verdict on a command line."""
    return judge(deployment(text, model))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One conflict: a deployment in which it holds, and one that is close and does not."""

    key: str
    meets: str
    passes: str
    model: ModelFacts = GLM
    passing_model: ModelFacts | None = None


def check_case(rules: Iterable[Conflict], case: Case) -> None:
    """The rule holds where it must, only there, and is told with the names of both sides."""
    rule = next(rule for rule in rules if rule.key == case.key)
    asked = deployment(case.meets, case.model)
    assert rule.holds(asked)
    assert not rule.holds(deployment(case.passes, case.passing_model or case.model))
    told = judge(asked)
    message = rule.message(asked)
    if rule.outcome is Outcome.REFUSE:
        assert message in told.refusals
    else:
        assert message in told.lines
    assert len(rule.names) >= 2
    for name in rule.names:
        flag = "--model" if name.startswith("model.") else asked.origins.get(name, named(name))
        assert flag.removeprefix("--") in message
    if rule.outcome is Outcome.SWITCH_OFF:
        assert told.deployment.value(rule.names[0]) == rule.becomes


def check_table(rules: Iterable[Conflict], cases: Iterable[Case]) -> None:
    """Each rule has its case."""
    assert sorted(rule.key for rule in rules) == sorted(case.key for case in cases)
