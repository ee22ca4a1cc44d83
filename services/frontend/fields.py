"""What becomes of body fields that no request model has: nothing is ignored silently.

A field of OpenAI's or vLLM's API that we do not serve is a 400 that names it, unless its value asks
for nothing (null, or the value that means "off"). A field nobody knows is served without, and named
in the response header `x-unknown-fields`.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final
from urllib.parse import quote

from pydantic import BaseModel

from services.frontend.errors import unsupported

UNKNOWN_FIELDS_HEADER: Final = "x-unknown-fields"
MAX_NAMES: Final = 16
MAX_NAME_CHARS: Final = 48
_NOT_BUILT: Final = "this version does not have it"

# Name to the values that ask for nothing, besides null.
_COMMON: Final[Mapping[str, tuple[object, ...]]] = {
    "best_of": (1,),
    "ec_transfer_params": (),
    "guided_decoding_backend": (),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "repetition_detection": (),
    "stream_interval": (1,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (),
}
CHAT_NOT_SERVED: Final[Mapping[str, tuple[object, ...]]] = {
    **_COMMON,
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "media_io_kwargs": (),
    "mm_payload": (),
    "mm_processor_kwargs": (),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "return_mm_kwargs": (False,),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
COMPLETION_NOT_SERVED: Final[Mapping[str, tuple[object, ...]]] = {
    **_COMMON,
    "prompt_embeds": (),
    "suffix": ("",),
}
SAMPLING_NOT_SERVED: Final[Mapping[str, tuple[object, ...]]] = {
    **_COMMON,
    "prompt_logprobs": (),
}
RESPONSE_NOT_SERVED: Final[Mapping[str, tuple[object, ...]]] = {
    **_COMMON,
    "context_management": ([],),
    "conversation": (),
    "enable_response_messages": (False,),
    "moderation": (),
    "previous_input_messages": ([],),
    "prompt": (),
    "prompt_logprobs": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "service_tier": ("auto", "default"),
}
MESSAGES_NOT_SERVED: Final[Mapping[str, tuple[object, ...]]] = {
    **_COMMON,
    "billing_policy": ({"type": "billing_policy", "bill_to": "self"},),
    "compaction": (),
    "container": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "prompt_logprobs": (),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
}
# What servers, ours too, put into assistant messages, and clients send back unchanged.
MESSAGE_NOT_SERVED: Final[Mapping[str, tuple[object, ...]]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": (),
}
STREAM_OPTIONS_NOT_SERVED: Final[Mapping[str, tuple[object, ...]]] = {
    "include_obfuscation": (False,),
}


def sort_extra(
    model: BaseModel | None, not_served: Mapping[str, tuple[object, ...]], path: str = ""
) -> list[str]:
    """Refuse the known fields among the extra ones; the paths of the unknown ones.

    Args:
        model: A parsed part of the body.
        not_served: Known names with the values that ask for nothing.
        path: Where the part stands, ending in a dot when not empty.
    """
    extra = model.model_extra if model is not None else None
    if not extra:
        return []
    unknown = []
    for name, value in extra.items():
        if name not in not_served:
            if value is not None:  # null is absent
                unknown.append(path + name)
        elif value is not None and not _asks_nothing(value, not_served[name]):
            raise unsupported(path + name, _NOT_BUILT)
    return unknown


def unknown_in_parts(
    model: BaseModel, path: str = "", *, except_for: Collection[str] = ()
) -> list[str]:
    """The paths of unknown fields in the parts of a model, at any depth; its own are not meant.

    Args:
        model: A parsed body or part of it.
        path: Where it stands, ending in a dot when not empty.
        except_for: Fields that the caller looks into by itself.
    """
    unknown: list[str] = []
    for name in type(model).model_fields:
        if name in except_for:
            continue
        for where, part in _parts_of(getattr(model, name), path + name):
            unknown += sort_extra(part, {}, f"{where}.")
            unknown += unknown_in_parts(part, f"{where}.")
    return unknown


def unknown_in_object(given: object, known: Collection[str], path: str) -> list[str]:
    """The paths of names of a JSON object that are not among the known ones."""
    names = given if isinstance(given, dict) else {}
    return [
        f"{path}.{name}" for name, value in names.items() if name not in known and value is not None
    ]


def unknown_header(names: Iterable[str]) -> dict[str, str]:
    """The warning header; names are percent-encoded, cut and counted, so any body is safe."""
    listed = list(names)
    if not listed:
        return {}
    shown = [quote(name[:MAX_NAME_CHARS], safe="[]._-") for name in listed[:MAX_NAMES]]
    if len(listed) > MAX_NAMES:
        shown.append(f"and-{len(listed) - MAX_NAMES}-more")
    return {UNKNOWN_FIELDS_HEADER: ", ".join(shown)}


def _parts_of(value: object, path: str) -> Iterator[tuple[str, BaseModel]]:
    if isinstance(value, BaseModel):
        yield path, value
    elif isinstance(value, list):
        for i, item in enumerate(value):
            if isinstance(item, BaseModel):
                yield f"{path}[{i}]", item


def _asks_nothing(value: object, harmless: tuple[object, ...]) -> bool:
    return any(type(value) is type(known) and value == known for known in harmless)
