"""The shipped chat template writes GLM-5.2's dialect byte for byte."""

import json
from pathlib import Path
from typing import Any

import pytest

from tools.nano.template import ChatTemplate

ROOT = Path(__file__).parents[3]
CASES = [
    json.loads(line)
    for line in (ROOT / "tests/data/render_cases.jsonl").read_text(encoding="utf-8").splitlines()
]


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate(ROOT / "models" / "glm-nano")


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['id']}-{case['desc']}")
def test_template_renders_vector(template: ChatTemplate, case: dict[str, Any]) -> None:
    text = template.render(
        case["messages"],
        case["tools"],
        add_generation_prompt=case["add_generation_prompt"],
        **case["kwargs"],
    )
    assert text == case["rendered"]


def test_deferred_tools_are_left_out(template: ChatTemplate) -> None:
    tools = [
        {"type": "function", "function": {"name": "a"}},
        {"type": "function", "function": {"name": "b", "defer_loading": True}},
    ]
    text = template.render([{"role": "user", "content": "x"}], tools)
    assert '{"name": "a"}' in text
    assert '"b"' not in text


def test_tool_reference_names_the_declared_tool(template: ChatTemplate) -> None:
    tools = [{"type": "function", "function": {"name": "a", "strict": True}}]
    content = [{"type": "tool_reference", "name": "a"}]
    text = template.render([{"role": "tool", "content": content}], tools)
    assert '<tool_response><tools>\n{"name": "a"}\n</tools></tool_response>' in text
