"""Fields of OpenAI's, Anthropic's and vLLM's bodies that are known here and not served.

Each name has the values that ask for nothing, besides null; any other value is a 400 that names the
field. `tests/services/frontend/test_not_served.py` holds the tables against the bodies of those
APIs.
"""

from collections.abc import Mapping
from typing import Final

Table = Mapping[str, tuple[object, ...]]

# Of vLLM, in whichever body they stand.
_COMMON: Final[Table] = {
    "best_of": (1,),
    "early_stopping": (False,),
    "ec_transfer_params": (),
    "guided_decoding_backend": (),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "media_io_kwargs": ({},),
    "mm_payload": (),
    "mm_processor_kwargs": ({},),
    "repetition_detection": (),
    "return_mm_kwargs": (False,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (),
    "stream_interval": (1,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (),
}
# Of OpenAI, in chats and responses.
_OPENAI: Final[Table] = {
    "moderation": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "service_tier": ("auto", "default"),
}
CHAT_NOT_SERVED: Final[Table] = {
    **_COMMON,
    **_OPENAI,
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "return_prompt_text": (False,),
    "store": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
COMPLETION_NOT_SERVED: Final[Table] = {
    **_COMMON,
    "prompt_embeds": (),
    "suffix": ("",),
    "thinking_token_budget": (-1,),
}
GENERATE_NOT_SERVED: Final[Table] = {
    "content_parts": ([],),
    "ec_transfer_params": (),
    "features": (),
    "kv_transfer_params": (),
    "reasoning_parser_kwargs": ({},),
    "return_token_ids": (False,),
    "token_offsets": (),
}
SAMPLING_NOT_SERVED: Final[Table] = {
    **_COMMON,
    "detokenize": (True, False),  # `output_mode` says whether there is text
    "extra_args": ({},),
    "flat_logprobs": (False,),
    "output_kind": (0,),
    "output_text_buffer_length": (0,),
    "prompt_logprob_start": (),
    "prompt_logprob_token_ids": (),
    "prompt_logprobs": (),
    "skip_clone": (True, False),  # of objects inside a server
    "skip_reading_prefix_cache": (False,),
    "spaces_between_special_tokens": (True, False),  # the tokenizer puts none
    "trace_decode_token_ids": (),
}
RESPONSE_NOT_SERVED: Final[Table] = {
    **_COMMON,
    **_OPENAI,
    "access_programs": ([],),
    "background_options": (),
    "context_management": ([],),
    "conversation": (),
    "enable_response_messages": (False,),
    "image": (),
    "previous_input_messages": ([],),
    "prompt": (),
    "prompt_logprobs": (),
    "skip_special_tokens": (True,),
}
MESSAGES_NOT_SERVED: Final[Table] = {
    **_COMMON,
    "billing_policy": ({"type": "billing_policy", "bill_to": "self"},),
    "compaction": (),
    "container": (),
    "diagnostics": (),
    "fallback_credit_token": (),
    "fallbacks": ([],),
    "inference_geo": (),
    "mcp_servers": ([],),
    "prompt_logprobs": (),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
    "user_profile_id": (),
    "workspace_id": (),
}
TOKENIZE_NOT_SERVED: Final[Table] = {
    "chat_template": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
}
# What servers, ours too, put into assistant messages, and clients send back unchanged.
MESSAGE_NOT_SERVED: Final[Table] = {
    "audio": (),
    "function_call": (),
}
CHAT_TOOL_NOT_SERVED: Final[Table] = {
    "defer_loading": (False,),
}
RESPONSE_TOOL_NOT_SERVED: Final[Table] = {
    "allowed_callers": (["direct"], []),
    "async": (False,),
    "defer_loading": (False,),
    "output_schema": (),
}
REASONING_NOT_SERVED: Final[Table] = {
    "context": ("auto",),
    "generate_summary": (),
    "mode": ("standard",),
}
MESSAGES_TOOL_NOT_SERVED: Final[Table] = {
    "allowed_callers": (["direct"], []),
    "eager_input_streaming": (True, False),  # arguments are streamed as they come
    "input_examples": ([],),
}
MESSAGES_THINKING_NOT_SERVED: Final[Table] = {
    "block_binding": (),
}
OUTPUT_CONFIG_NOT_SERVED: Final[Table] = {
    "task_budget": (),
}
STREAM_OPTIONS_NOT_SERVED: Final[Table] = {
    "include_obfuscation": (False,),
}
