"""A small vocabulary with every control token, in which every single byte is a token."""

import pytest

from shared.glm.tokenizer import Vocabulary
from tests.services.detokenizer.words import VOCABULARY


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    return VOCABULARY
