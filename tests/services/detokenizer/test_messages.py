from dataclasses import replace

import pytest

from protos.glm.v1 import detokenizer_pb2
from services.detokenizer import messages
from services.detokenizer.messages import MAX_LABEL_BYTES, SequenceSpec, label_of
from shared.wire import pack_ids
from tests.services.detokenizer.frames import submit


@pytest.mark.parametrize(
    ("ours", "theirs", "prefix"),
    [
        (messages.ObjectKind, detokenizer_pb2.ObjectKind, "OBJECT_KIND_"),
        (messages.ToolChoice, detokenizer_pb2.ToolChoiceMode, "TOOL_CHOICE_MODE_"),
    ],
)
def test_numbers_are_those_of_the_contract(ours: type, theirs: object, prefix: str) -> None:
    named = {prefix + member.name: int(member) for member in ours}  # type: ignore[attr-defined]  # an enum
    expected = {name: number for name, number in theirs.items() if number}  # type: ignore[attr-defined]  # protobuf
    assert named == expected


def test_prompts_stay_packed_and_are_counted() -> None:
    spec = SequenceSpec(
        index=0, prompt_token_ids=pack_ids([5, 6]), output_token_ids=pack_ids([7, 2**31])
    )
    assert spec.num_prompt_tokens == 2
    assert spec.unpack_output() == [7, 2**31]


def test_a_label_of_128_bytes_is_taken_whatever_its_letters() -> None:
    assert len(label_of("é" * 64).encode()) <= MAX_LABEL_BYTES
    assert label_of("short") == "short"


def test_ids_of_attempts_differ_and_stay_within_the_limit_of_schedulers() -> None:
    longest = replace(submit(), request_id="é" * 64)
    ids = {replace(longest, attempt=number).attempt_id for number in (0, 1, 2, 2**32 - 1)}
    assert len(ids) == 4
    assert max(len(name.encode()) for name in ids) <= 128
