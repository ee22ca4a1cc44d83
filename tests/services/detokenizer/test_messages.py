import pytest

from protos.glm.v1 import detokenizer_pb2
from services.detokenizer import messages
from services.detokenizer.messages import SequenceSpec
from shared.wire import pack_ids


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
