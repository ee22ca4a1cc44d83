import pytest

from services.detokenizer.messages import ObjectKind
from shared.errors import RequestError
from tests.services.detokenizer.driven import drive


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (ObjectKind.CHAT_COMPLETION, "chat.completion"),
        (ObjectKind.TEXT_COMPLETION, "text_completion"),
        (ObjectKind.RESPONSE, "response"),
        (ObjectKind.TOKENS, "generate"),
    ],
)
def test_each_kind_has_its_object(kind: ObjectKind, name: str) -> None:
    assert drive(kind, "R</think>Hi").body["object"] == name


def test_a_message_says_so_by_its_type() -> None:
    assert drive(ObjectKind.MESSAGE, "Hi").body["type"] == "message"


@pytest.mark.parametrize("kind", [ObjectKind.RESPONSE, ObjectKind.MESSAGE])
def test_a_list_of_items_is_of_one_choice(kind: ObjectKind) -> None:
    from services.detokenizer.build import build_response
    from tests.services.detokenizer.frames import CONTEXT, submit

    with pytest.raises(RequestError) as caught:
        build_response(submit(2, object_kind=kind), CONTEXT, 0.0)
    assert caught.value.field == "sequences"
