"""Which presenter writes which kind of object."""

from collections.abc import Callable

from services.detokenizer.assemble import (
    BodyPresenter,
    Chunks,
    Presenter,
    StreamPresenter,
    encode,
)
from services.detokenizer.chat import CHUNK, ChatChunks, chat_entry
from services.detokenizer.chat import OBJECT as CHAT
from services.detokenizer.choice import Choice
from services.detokenizer.completion import OBJECT as COMPLETION
from services.detokenizer.completion import CompletionChunks, completion_entry
from services.detokenizer.logprobs import LogprobWriter
from services.detokenizer.message_events import MessageStream
from services.detokenizer.message_object import MessageBody
from services.detokenizer.messages import ObjectKind, OutputSpec
from services.detokenizer.response_events import ResponseStream
from services.detokenizer.response_object import ResponseBody
from services.detokenizer.token_object import OBJECT as TOKENS
from services.detokenizer.token_object import TokenChunks, token_entry
from services.detokenizer.usage import Usage

CountUsage = Callable[[], Usage]


def presenter_of(
    spec: OutputSpec, logprobs: LogprobWriter, count: CountUsage, *, fingerprint: str
) -> Presenter:
    """The presenter for a request."""
    if spec.object_kind is ObjectKind.RESPONSE:
        return (ResponseStream if spec.is_stream else ResponseBody)(spec, logprobs, count)
    if spec.object_kind is ObjectKind.MESSAGE:
        return (MessageStream if spec.is_stream else MessageBody)(spec, count)
    if spec.is_stream:
        name, chunks = _chunks(spec, logprobs)
        return StreamPresenter(spec, name, chunks, count, fingerprint=fingerprint)
    name, entry = _entries(spec, logprobs)

    def tail(choice: Choice) -> bytes:
        if spec.object_kind is not ObjectKind.CHAT_COMPLETION or not choice.measured_token_ids:
            return b""
        return b',"prompt_logprobs":' + encode(logprobs.prompt(choice))

    return BodyPresenter(spec, name, entry, count, fingerprint=fingerprint, tail=tail)


def _chunks(spec: OutputSpec, logprobs: LogprobWriter) -> tuple[str, Chunks]:
    if spec.object_kind is ObjectKind.CHAT_COMPLETION:
        return CHUNK, ChatChunks(spec, logprobs)
    if spec.object_kind is ObjectKind.TOKENS:
        return TOKENS, TokenChunks(spec)
    return COMPLETION, CompletionChunks(spec, logprobs)


def _entries(spec: OutputSpec, logprobs: LogprobWriter) -> tuple[str, Callable[[Choice], bytes]]:
    if spec.object_kind is ObjectKind.CHAT_COMPLETION:
        return CHAT, lambda choice: chat_entry(spec, logprobs, choice)
    if spec.object_kind is ObjectKind.TOKENS:
        return TOKENS, lambda choice: token_entry(spec, choice)
    return COMPLETION, lambda choice: completion_entry(spec, logprobs, choice)
