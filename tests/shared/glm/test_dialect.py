import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from shared.errors import CheckpointError
from shared.glm.dialect import Dialect


def checkpoint(nano_dir: Path, tmp_path: Path, **files: Any) -> Path:
    for name in ("tokenizer.json", "chat_template.jinja"):
        shutil.copy(nano_dir / name, tmp_path / name)
    for name, value in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    return tmp_path


def test_end_ids_are_the_union_with_the_primary_first(nano_dir: Path, tmp_path: Path) -> None:
    found = Dialect.load(
        checkpoint(
            nano_dir,
            tmp_path,
            generation_config={"eos_token_id": [846, 853], "temperature": 0.7},
            config={"eos_token_id": [855, 846], "vocab_size": 896},
        )
    )
    assert found.eos_token_ids == (846, 853, 855)
    assert found.generation_defaults["temperature"] == 0.7
    # Ids behind the tokenizer's are padding of the embedding: nothing can be meant by them.
    assert found.vocab_size == len(found.vocabulary) < 896


def test_without_configs_the_end_of_text_ends(nano_dir: Path, tmp_path: Path) -> None:
    found = Dialect.load(checkpoint(nano_dir, tmp_path))
    assert found.eos_token_ids == (found.control.end_of_text,)


@pytest.mark.parametrize(
    "files",
    [
        {"config": {"vocab_size": 10}},
        {"generation_config": {"eos_token_id": 5000}},
        {"config": ["x"]},
    ],
)
def test_a_checkpoint_that_contradicts_itself_is_refused(
    nano_dir: Path, tmp_path: Path, files: dict[str, Any]
) -> None:
    with pytest.raises(CheckpointError):
        Dialect.load(checkpoint(nano_dir, tmp_path, **files))


def test_tokens_are_shown_as_string_and_bytes(dialect: Dialect) -> None:
    token = dialect.encode(" é", allow_control=False)[0]
    assert dialect.token_bytes(token).startswith(b" ")
    assert dialect.token_string(token).startswith("Ġ")
    assert dialect.token_string(10**6) == ""
    assert dialect.token_bytes(10**6) == b""


def test_template_argument_names_let_unknown_ones_be_reported(dialect: Dialect) -> None:
    assert {"enable_thinking", "clear_thinking"} <= dialect.template_argument_names


@pytest.mark.parametrize(
    "template",
    [
        "",
        "hello",
        "{{ foo.bar.baz }}",
        "{% for i in range(10**12) %}{% endfor %}",
        "[gMASK]<sop><|user|>{{ messages[0].content }}<|assistant|><think>",
    ],
)
def test_a_template_that_serves_nobody_is_refused_at_start(
    nano_dir: Path, tmp_path: Path, template: str
) -> None:
    folder = checkpoint(nano_dir, tmp_path)
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(CheckpointError, match="chat template"):
        Dialect.load(folder)


@pytest.mark.parametrize("name", ["tokenizer", "tokenizer_config", "config", "generation_config"])
@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "null"])
def test_a_file_that_holds_no_object_is_refused_by_its_name(
    nano_dir: Path, tmp_path: Path, name: str, text: str
) -> None:
    folder = checkpoint(nano_dir, tmp_path)
    (folder / f"{name}.json").write_text(text)
    with pytest.raises(CheckpointError, match=f"{name}.json"):
        Dialect.load(folder)
