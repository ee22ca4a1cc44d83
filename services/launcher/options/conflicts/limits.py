"""Conflicts of the limits of a step, and of what the checkpoint is."""

from typing import Final

from services.launcher.options.rules import Conflict, Outcome

_TOKENS = "settings.max_num_batched_tokens"
_SEQS = "settings.max_num_seqs"
_LEN = "settings.max_model_len"


def _less(low: int | None, high: int | None) -> bool:
    return low is not None and high is not None and low < high


LIMITS: Final = (
    Conflict(
        key="tokens-seqs",
        names=(_TOKENS, _SEQS),
        holds=lambda asked: _less(
            asked.settings.max_num_batched_tokens, asked.settings.max_num_seqs
        ),
        outcome=Outcome.REFUSE,
        text="a step holds at least one token of each sequence",
        source="vLLM config/scheduler.py",
    ),
    Conflict(
        key="tokens-drafts",
        names=(_TOKENS, _SEQS, "speculative_config.num_speculative_tokens"),
        holds=lambda asked: (
            asked.num_drafts > 0
            and _less(
                asked.settings.max_num_batched_tokens,
                (asked.settings.max_num_seqs or 0) * (1 + asked.num_drafts),
            )
        ),
        outcome=Outcome.WARN,
        text="a step is too small for one token and all drafts of every sequence",
        source="GLM-5.2 guide, 5.1.3.1",
    ),
    Conflict(
        key="tokens-length",
        names=(_TOKENS, _LEN, "enable_chunked_prefill"),
        holds=lambda asked: (
            not asked.flags.enable_chunked_prefill
            and _less(asked.settings.max_num_batched_tokens, asked.settings.max_model_len)
        ),
        outcome=Outcome.REFUSE,
        text="without chunks a step has to hold the longest prompt",
        source="vLLM config/scheduler.py",
    ),
    Conflict(
        key="length-model",
        names=(_LEN, "model.max_position_embeddings"),
        holds=lambda asked: _less(
            asked.model.max_position_embeddings, asked.settings.max_model_len
        ),
        outcome=Outcome.REFUSE,
        text="the checkpoint knows no positions beyond",
        source="vLLM config/model.py",
    ),
    Conflict(
        key="quantization-missing",
        names=("quantization", "model.has_quant_description"),
        holds=lambda asked: (
            asked.flags.quantization == "ascend" and not asked.model.has_quant_description
        ),
        outcome=Outcome.REFUSE,
        text="the checkpoint has no quant_model_description.json",
        source="vllm-ascend quantization",
    ),
    Conflict(
        key="quantization-none",
        names=("quantization", "model.has_quant_description"),
        holds=lambda asked: (
            asked.flags.quantization == "none" and asked.model.has_quant_description
        ),
        outcome=Outcome.REFUSE,
        text="the checkpoint's quant_model_description.json says that its weights are quantized",
        source="vllm-ascend quantization",
    ),
    Conflict(
        key="tools-parser",
        names=("enable_auto_tool_choice", "settings.tool_call_parser"),
        holds=lambda asked: (
            asked.is_given("enable_auto_tool_choice")
            and asked.flags.enable_auto_tool_choice
            and asked.settings.tool_call_parser == "none"
        ),
        outcome=Outcome.REFUSE,
        text="the model's calls cannot be read without their parser",
        source="vLLM entrypoints/openai/cli_args.py",
    ),
)
