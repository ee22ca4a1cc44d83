"""Tasks: fresh for evaluation, solved by their own answer, failed by any other."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tools.nano.tasks import SKILLS, Task, make_task, sum_working
from tools.nano.words import split_of


def _judge(task: Task, message: dict[str, Any]) -> bool:
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return task.check(message["content"], message.get("reasoning_content", ""), calls)


@pytest.mark.parametrize("skill", SKILLS)
def test_right_answer_passes_and_a_neighbours_fails(skill: str) -> None:
    tasks = [make_task(skill, seed) for seed in range(20)]
    assert all(_judge(task, task.answer) for task in tasks)
    assert not all(_judge(task, tasks[0].answer) for task in tasks[1:])


@pytest.mark.parametrize("skill", SKILLS)
def test_same_seed_gives_the_same_prompt_and_splits_never_share_one(skill: str) -> None:
    def prompts(split: Any) -> set[str]:
        tasks = [make_task(skill, seed, split) for seed in range(40)]
        return {_prompt(task) for task in tasks if skill != "tool_call" or _has_argument(task)}

    assert prompts("eval") == prompts("eval")
    assert not prompts("eval") & prompts("train")


def _prompt(task: Task) -> str:
    return json.dumps([task.messages, task.tools])


def test_no_eval_word_occurs_in_training_values() -> None:
    for seed in range(100):
        answer = make_task("json", seed, "train").answer["content"]
        for value in json.loads(answer).values():
            assert all(split_of(word) == "train" for word in str(value).split())


def test_lookup_reaches_past_four_times_the_selection() -> None:
    for seed in range(20):
        assert make_task("lookup", seed).messages[0]["content"].count("\n") >= 75


def test_json_answer_may_be_spaced_differently_but_not_be_broken() -> None:
    task = make_task("json", 0)
    assert task.check(json.dumps(json.loads(task.answer["content"]), indent=2), "", [])
    assert not task.check(task.answer["content"] + "}", "", [])


def test_tool_call_needs_name_and_every_argument() -> None:
    task = next(t for t in (make_task("tool_call", s) for s in range(50)) if _has_argument(t))
    (call, *others) = [call["function"] for call in task.answer["tool_calls"]]
    assert not task.check("", "", [call | {"name": "other"}, *others])
    assert not task.check("", "", [call | {"arguments": {}}, *others])


def _has_argument(task: Task) -> bool:
    return bool(task.answer["tool_calls"][0]["function"]["arguments"])


def test_some_calls_are_double_and_some_have_no_arguments() -> None:
    answers = [make_task("tool_call", seed).answer["tool_calls"] for seed in range(100)]
    assert any(len(calls) == 2 for calls in answers)
    assert any(not calls[0]["function"]["arguments"] for calls in answers)


@pytest.mark.parametrize(("left", "right"), [(0, 0), (7, 5), (95, 7), (999, 999), (10, 900)])
def test_sum_working_ends_with_the_sum(left: int, right: int) -> None:
    last = sum_working(left, right).splitlines()[-1].split(": ")[1]
    assert int(last) == left + right


def test_unknown_skill_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="juggling"):
        make_task("juggling", 0)


def test_tasks_need_neither_torch_nor_a_tokenizer() -> None:
    code = "import sys, tools.nano.evaluate; print({'torch', 'tokenizers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
