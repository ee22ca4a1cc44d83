"""Control tokens of the GLM dialect: added tokens that structure a conversation.

Ids differ between checkpoints (GLM-5.2 starts at 154820, glm-nano at 846), spellings do not; so
ids are always looked up by spelling in the tokenizer that was loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from shared.errors import ConfigError

SPELLINGS: dict[str, str] = {
    "end_of_text": "<|endoftext|>",
    "gmask": "[gMASK]",
    "sop": "<sop>",
    "system": "<|system|>",
    "user": "<|user|>",
    "assistant": "<|assistant|>",
    "observation": "<|observation|>",
    "think": "<think>",
    "end_think": "</think>",
    "tool_call": "<tool_call>",
    "end_tool_call": "</tool_call>",
    "tool_response": "<tool_response>",
    "end_tool_response": "</tool_response>",
    "arg_key": "<arg_key>",
    "end_arg_key": "</arg_key>",
    "arg_value": "<arg_value>",
    "end_arg_value": "</arg_value>",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlTokens:
    """Ids of the control tokens that the dialect works with."""

    end_of_text: int
    gmask: int
    sop: int
    system: int
    user: int
    assistant: int
    observation: int
    think: int
    end_think: int
    tool_call: int
    end_tool_call: int
    tool_response: int
    end_tool_response: int
    arg_key: int
    end_arg_key: int
    arg_value: int
    end_arg_value: int

    @classmethod
    def resolve(cls, added_tokens: Mapping[str, int]) -> "ControlTokens":
        """Look every control token up by spelling; `ConfigError` lists those that are missing."""
        missing = [text for text in SPELLINGS.values() if text not in added_tokens]
        if missing:
            raise ConfigError(f"tokenizer.json lacks control tokens of GLM: {' '.join(missing)}")
        return cls(**{name: added_tokens[text] for name, text in SPELLINGS.items()})

    def ids(self) -> frozenset[int]:
        """All of them."""
        return frozenset(getattr(self, field.name) for field in fields(self))
