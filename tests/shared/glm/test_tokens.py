import pytest

from shared.errors import ConfigError
from shared.glm.tokens import SPELLINGS, ControlTokens


def test_ids_come_from_the_loaded_tokenizer() -> None:
    added = {text: 154820 + i for i, text in enumerate(SPELLINGS.values())}
    control = ControlTokens.resolve(added)
    assert control.think == added["<think>"]
    assert control.ids() == frozenset(added.values())


def test_a_missing_control_token_is_named() -> None:
    added = {text: i for i, text in enumerate(SPELLINGS.values()) if text != "<arg_key>"}
    with pytest.raises(ConfigError, match="<arg_key>"):
        ControlTokens.resolve(added)
