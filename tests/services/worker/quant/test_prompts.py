"""Calibration prompts in all their forms, and what is said about those that are none."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.worker.quant.prompts import read_prompts
from shared.errors import ConfigError
from shared.glm.dialect import Dialect

NANO = Path(__file__).parents[4] / "models" / "glm-nano"
ASK = {"role": "user", "content": "What is 1 + 2?"}
ANSWER = {"role": "assistant", "content": "3", "reasoning_content": "1+2+0=3: 3"}


@pytest.fixture(scope="module")
def dialect() -> Dialect:
    return Dialect.load(NANO)


def write(folder: Path, *values: Any, name: str = "c.jsonl") -> Path:
    file = folder / name
    file.write_text("".join(f"{json.dumps(value)}\n" for value in values))
    return file


def read(
    file: Path, *, model: Path = NANO, max_tokens: int = 10_000, max_length: int = 1000
) -> list[list[int]]:
    return read_prompts(file, model, vocab_size=896, max_tokens=max_tokens, max_length=max_length)


@pytest.mark.parametrize("value", ["Repeat: moon", {"text": "Repeat: moon"}])
def test_a_text_is_encoded(tmp_path: Path, dialect: Dialect, value: Any) -> None:
    assert read(write(tmp_path, value)) == [dialect.encode("Repeat: moon", allow_control=True)]


def test_lines_of_a_text_file_are_texts_whatever_they_look_like(
    tmp_path: Path, dialect: Dialect
) -> None:
    file = tmp_path / "c.txt"
    file.write_text("[1, 2]\n\n  \n")
    assert read(file) == [dialect.encode("[1, 2]", allow_control=True)]


@pytest.mark.parametrize("value", [[5, 6, 7], {"token_ids": [5, 6, 7]}])
def test_token_ids_need_no_tokenizer(tmp_path: Path, value: Any) -> None:
    assert read(write(tmp_path, value), model=tmp_path) == [[5, 6, 7]]


def test_a_question_ends_where_the_model_begins(tmp_path: Path, dialect: Dialect) -> None:
    rendered = dialect.render_chat([ASK], None, template_kwargs={}).token_ids
    assert read(write(tmp_path, [ASK])) == [rendered]


def test_a_whole_chat_is_taken_as_it_is(tmp_path: Path, dialect: Dialect) -> None:
    switch = {"enable_thinking": False}
    chat = {"messages": [ASK, ANSWER], "chat_template_kwargs": switch}
    (ids,) = read(write(tmp_path, chat))
    rendered = dialect.render_chat(
        [ASK, ANSWER], None, template_kwargs=switch, add_generation_prompt=False
    )
    assert ids == rendered.token_ids


def test_tools_are_shown(tmp_path: Path, dialect: Dialect) -> None:
    tool = {"type": "function", "function": {"name": "get_time", "parameters": {}}}
    (ids,) = read(write(tmp_path, {"messages": [ASK], "tools": [tool]}))
    assert "get_time" in dialect.decode(ids)


def test_prompts_are_cut_to_length_and_to_the_tokens_wanted(tmp_path: Path) -> None:
    file = write(tmp_path, *([number] * 10 for number in range(20)))
    assert {len(prompt) for prompt in read(file, max_length=4)} == {4}
    prompts = read(file, max_tokens=25)
    assert [len(prompt) for prompt in prompts] == [10, 10, 5]


def test_a_sorted_file_is_drawn_from_everywhere_and_always_alike(tmp_path: Path) -> None:
    file = write(tmp_path, *([number] for number in range(400)))
    drawn = [prompt[0] for prompt in read(file, max_tokens=40)]
    assert drawn == [prompt[0] for prompt in read(file, max_tokens=40)]
    assert min(drawn) < 100
    assert max(drawn) > 300


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: is no JSON"),
        ("3", "is 3, must be text, chat or token ids"),
        ("[896]", "token id 896 is outside the vocabulary of 896"),
        ("[-1]", "token id -1 is outside"),
        ('{"prompt": "x"}', "one of text, token_ids, messages"),
        ('{"text": 3}', "one of text, token_ids, messages"),
        ('{"messages": [], "tool": []}', "unknown key 'tool'"),
        ('[{"role": "nobody", "content": "x"}]', "line 1: "),
        ('["a", "b"]', "is no chat"),
        ('{"messages": []}', r"messages is \[\], must be a list of messages"),
        ('{"messages": 3}', "messages is 3, must be a list of messages"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "c.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(ConfigError, match=rf"--calibration {file}: .*{message}"):
        read(file)


def test_a_file_without_prompts_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"c\.jsonl: has no prompt"):
        read(write(tmp_path))
    with pytest.raises(ConfigError, match=r"absent: cannot be read"):
        read(tmp_path / "absent")


def test_the_shipped_prompts_of_glm_nano_fit_it(dialect: Dialect) -> None:
    prompts = read(NANO / "calibration.jsonl", max_tokens=16_384, max_length=4096)
    assert sum(map(len, prompts)) == 16_384
    assert max(map(len, prompts)) > 512  # some select: index_topk is 128
