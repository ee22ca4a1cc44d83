"""Whatever is typed ends in a deployment or in lines that say why not; never in an exception."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from services.launcher.options.additional import AdditionalConfig
from services.launcher.options.build import build
from services.launcher.options.command_line import OWN, read_command_line
from services.launcher.options.deployment import Deployment
from services.launcher.options.environment import Environment, read_environment
from services.launcher.options.judge import judge
from services.launcher.options.serve import FLAGS, JSON_FLAGS, SHORT
from tests.services.launcher.options.cases import GLM

KEYS = [*AdditionalConfig.model_fields, "kv_role", "connectors", "cudagraph_mode", "prefill", "x"]
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
    ),
    max_leaves=8,
)
WORDS = st.one_of(
    st.sampled_from([*FLAGS, *SHORT, *OWN]),
    st.sampled_from([f"--no-{flag[2:]}" for flag in FLAGS]),
    st.sampled_from([f"--{name.replace('_', '-')}.{key}" for name in JSON_FLAGS for key in KEYS]),
    st.sampled_from(
        ["1", "2", "16", "-1", "0", "true", "ascend", "auto", "-", "--", "=", "--=", ""]
    ),
    st.text(max_size=8),
    TREES.map(json.dumps),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(WORDS, max_size=10))
def test_any_words_are_read(words: list[str]) -> None:
    line = read_command_line(words)
    built = build(line.values, {})
    judge(Deployment(flags=built.flags, model=GLM, origins=built.origins))
    assert all(line.strip() for line in [*line.problems, *built.problems, *built.lines])


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(sorted(JSON_FLAGS)),
        st.dictionaries(st.sampled_from(KEYS), TREES, max_size=5),
        max_size=4,
    )
)
def test_any_json_is_judged(values: dict[str, Any]) -> None:
    built = build(values, {})
    verdict = judge(Deployment(flags=built.flags, model=GLM, origins=built.origins))
    assert all(isinstance(text, str) for text in [*verdict.refusals, *verdict.lines])


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(Environment.model_fields)), st.text(max_size=12)))
def test_any_variables_are_read(variables: dict[str, str]) -> None:
    environment, problems = read_environment(variables)
    judge(Deployment(environment=environment, model=GLM))
    assert all(problem.partition("=")[0] in variables for problem in problems)
