"""Descriptions of answers agree with what is sent."""

import json

from services.frontend.errors import invalid
from services.frontend.schemas.answers import ChatCompletion, ErrorAnswer, TextCompletion
from tests.services.frontend.conftest import Mesh


def test_errors_are_as_described() -> None:
    answer = ErrorAnswer.model_validate_json(invalid("m", None).body())
    assert answer.model_dump() == json.loads(invalid("m", None).body())


async def test_answers_are_as_described(mesh: Mesh) -> None:
    ChatCompletion.model_validate_json((await mesh.chat()).content)
    TextCompletion.model_validate_json((await mesh.complete()).content)
