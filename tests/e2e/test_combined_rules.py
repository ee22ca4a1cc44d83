"""Forms of the output beside other rules about its tokens, over HTTP."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.mesh import Mesh

NO_THINKING: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
POINT: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {
        "name": "point",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"x": {"type": "integer", "maximum": 99}, "kind": {"enum": ["a", "b"]}},
            "required": ["x", "kind"],
            "additionalProperties": False,
        },
    },
}


def ask(mesh: Mesh, text: str = "What is 1 + 1?", **options: Any) -> Any:
    given = {"max_tokens": 200, "temperature": 0} | options
    return (
        mesh.client()
        .chat.completions.create(
            model="glm-nano", messages=[{"role": "user", "content": text}], **given
        )
        .choices[0]
    )


def ids(mesh: Mesh, text: str) -> list[int]:
    body = {"prompt": text, "add_special_tokens": False}
    found: list[int] = httpx.post(f"{mesh.url}/tokenize", json=body, timeout=60).json()["tokens"]
    return found


def test_allowed_ids_and_an_expression_leave_what_both_allow(nano: Mesh) -> None:
    letters = [ids(nano, letter)[0] for letter in "xyz1"]
    body = {"structured_outputs": {"regex": "[w-z]{12}"}, "allowed_token_ids": letters}
    content = ask(nano, extra_body=body | NO_THINKING).message.content
    assert len(content) == 12
    assert set(content) <= set("xyz")


def test_rules_that_leave_no_token_are_a_400_that_names_them(nano: Mesh) -> None:
    body = {"structured_outputs": {"regex": "q{12}"}, "allowed_token_ids": ids(nano, "z")}
    with pytest.raises(openai.BadRequestError, match="allowed_token_ids and bad_words") as caught:
        ask(nano, extra_body=body | NO_THINKING)
    assert caught.value.param == "structured_outputs"


def test_bad_words_do_not_come_in_a_form(nano: Mesh) -> None:
    body = {"structured_outputs": {"choice": ["b", "a"]}, "bad_words": ["a"]}
    assert ask(nano, extra_body=body | NO_THINKING).message.content == "b"


def test_more_tokens_than_a_form_has_do_not_keep_it_from_ending(nano: Mesh) -> None:
    body = {"structured_outputs": {"choice": ["yes"]}, "min_tokens": 100, "return_token_ids": True}
    answer = ask(nano, extra_body=body | NO_THINKING)
    assert (answer.message.content, answer.finish_reason) == ("yes", "stop")
    assert len(answer.token_ids) == len(ids(nano, "yes")) + 1


@pytest.mark.parametrize("budget", [0, 6])
def test_a_spent_budget_of_thinking_leads_into_the_form(nano: Mesh, budget: int) -> None:
    answer = ask(nano, response_format=POINT, extra_body={"thinking_token_budget": budget})
    assert set(json.loads(answer.message.content)) == {"x", "kind"}
    assert answer.finish_reason == "stop"


def test_a_stop_string_cuts_json_where_it_stands(nano: Mesh) -> None:
    answer = ask(nano, response_format=POINT, stop='"kind"', extra_body=NO_THINKING)
    assert answer.finish_reason == "stop"
    assert answer.stop_reason == '"kind"'
    assert answer.message.content.startswith('{"x"')
    assert '"kind"' not in answer.message.content


def test_a_stop_string_of_the_thinking_does_not_reach_the_form(nano: Mesh) -> None:
    thinking = ask(nano, response_format=POINT).message.reasoning
    assert thinking
    answer = ask(nano, response_format=POINT, stop=thinking.strip()[:8])
    assert set(json.loads(answer.message.content)) == {"x", "kind"}


def test_json_ends_though_blanks_are_liked_best(nano: Mesh) -> None:
    bias = {str(ids(nano, blank)[0]): 100.0 for blank in (" ", "\n", "\t")}
    bias[str(ids(nano, '"')[0])] = 60.0
    answer = ask(
        nano, response_format=POINT, logit_bias=bias, max_tokens=600, extra_body=NO_THINKING
    )
    assert answer.finish_reason == "stop"
    assert set(json.loads(answer.message.content)) == {"x", "kind"}
    assert "\n" in answer.message.content or " " in answer.message.content


def test_a_stream_that_gets_stuck_shows_what_came_and_ends_with_the_error(nano: Mesh) -> None:
    stream = nano.client().chat.completions.create(
        model="glm-nano",
        messages=[{"role": "user", "content": "x"}],
        stream=True,
        max_tokens=50,
        extra_body={
            "structured_outputs": {"regex": "z{4}q"},
            "allowed_token_ids": ids(nano, "z"),
            **NO_THINKING,
        },
    )
    pieces: list[str] = []
    with pytest.raises(openai.APIError, match="leaves no token") as caught:
        pieces.extend(chunk.choices[0].delta.content or "" for chunk in stream)
    assert caught.value.code == "invalid_value"


def _children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text("ascii").split()]


def test_a_checker_that_is_killed_between_requests_is_missed_by_nobody(nano: Mesh) -> None:
    worker = nano.pid("worker")
    ask(nano, extra_body={"structured_outputs": {"regex": "a{2}"}} | NO_THINKING)
    checkers = _children(worker)  # one for heavy constraints too, once there was any
    assert checkers
    for checker in checkers:
        os.kill(checker, signal.SIGKILL)
    body = {"structured_outputs": {"regex": "b{3}"}} | NO_THINKING
    assert ask(nano, extra_body=body).message.content == "bbb"
    assert nano.pid("worker") == worker
    nano.until(lambda: bool({*_children(worker)} - {*checkers}), 10, "there is a new one")
