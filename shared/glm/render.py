"""Chat messages -> prompt ids, such that the model sees exactly the message list.

No client text can forge a turn: before the template runs, every spelling of a control token in
a client's string is broken up by a guard character that the client's texts do not contain; the
template's own control tokens stay whole. The rendered text is then cut at the whole spellings,
the guards are taken out, and everything between is encoded without added tokens. Ids equal
those of the reference wherever the client wrote no control token.
"""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.errors import FailureReason, RequestError
from shared.glm.messages import invalid, normalize_messages
from shared.glm.template import ChatTemplate
from shared.glm.tokenizer import GlmTokenizer
from shared.glm.tokens import ControlTokens

_PRIVATE_USE = re.compile("[\ue000-\uf8ff]")
_SURROGATE = re.compile("[\ud800-\udfff]")
# Far above any real schema, far below where JSON writers run out of stack.
_MAX_DEPTH = 100
_RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedPrompt:
    """A prompt: its ids, its text, and whether it ends inside an open think block.

    `encode_started_ns` is the epoch time at which the text was ready, for the trace.
    """

    token_ids: list[int]
    text: str
    starts_in_reasoning: bool
    encode_started_ns: int = 0


def render_chat(
    tokenizer: GlmTokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    template_kwargs: Mapping[str, Any],
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> RenderedPrompt:
    """Render and encode; see `shared.glm.dialect.Dialect.render_chat`."""
    reserved = sorted(_RESERVED.intersection(template_kwargs))
    if reserved:
        raise invalid(f"chat_template_kwargs.{reserved[0]}", "cannot be set here")
    if continue_final_message and add_generation_prompt:
        raise invalid("continue_final_message", "excludes add_generation_prompt")
    normal = normalize_messages(messages)
    guard, end_mark = _pick_unused(normal, tools, template_kwargs)
    breaker = _Breaker(tokenizer.spellings, guard)
    broken = breaker.break_up(normal, "messages")
    if continue_final_message:
        _mark_end(broken, end_mark)
    rendered = template.render(
        broken,
        breaker.break_up(list(tools), "tools") if tools else None,
        add_generation_prompt=add_generation_prompt,
        arguments=breaker.break_up(dict(template_kwargs), "chat_template_kwargs"),
    )
    if continue_final_message:
        rendered = _cut_at(rendered, end_mark)
    pieces = tokenizer.split_control(rendered)
    pieces[::2] = [piece.replace(guard, "") for piece in pieces[::2]]
    encode_started_ns = time.time_ns()
    token_ids = tokenizer.encode_pieces(pieces)
    return RenderedPrompt(
        encode_started_ns=encode_started_ns,
        token_ids=token_ids,
        text="".join(pieces),
        starts_in_reasoning=ends_in_reasoning(token_ids, tokenizer.vocabulary.control),
    )


def ends_in_reasoning(token_ids: Sequence[int], control: ControlTokens) -> bool:
    """Whether a prompt leaves a think block open after its last assistant marker."""
    for token in reversed(token_ids):
        if token == control.think:
            return True
        if token in (control.end_think, control.tool_call, control.assistant):
            return False
    return False


class _Breaker:
    """Copies client values with every control spelling broken up."""

    def __init__(self, spellings: re.Pattern[str], guard: str) -> None:
        self._spellings = spellings
        self._guard = guard

    def break_up(self, value: Any, where: str, depth: int = 0) -> Any:  # noqa: ANN401
        """Any JSON value; `where` names it in an error."""
        if isinstance(value, str):
            return self._text(value, where)
        if depth > _MAX_DEPTH:
            raise invalid(where, f"is nested deeper than {_MAX_DEPTH} levels")
        if isinstance(value, Mapping):
            return {
                self._text(str(key), where): self.break_up(item, f"{where}.{key}", depth + 1)
                for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.break_up(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
        return value

    def _text(self, text: str, where: str) -> str:
        if not text.isascii() and _SURROGATE.search(text):
            raise invalid(where, "holds a lone surrogate")
        return self._spellings.sub(self._split, text)

    def _split(self, match: re.Match[str]) -> str:
        spelling = match.group()
        return spelling[0] + self._guard + spelling[1:]


def _pick_unused(*values: object) -> tuple[str, str]:
    """Two private-use characters that no client text contains."""
    used: set[str] = set()
    pending: list[Any] = list(values)
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            if not value.isascii():
                used.update(_PRIVATE_USE.findall(value))
        elif isinstance(value, Mapping):
            pending.extend(value.keys())
            pending.extend(value.values())
        elif isinstance(value, (list, tuple)):
            pending.extend(value)
    free = (chr(code) for code in range(0xE000, 0xF900) if chr(code) not in used)
    guard, end_mark = next(free, None), next(free, None)
    if guard is None or end_mark is None:
        raise RequestError(
            FailureReason.INVALID_ARGUMENT,
            "messages: every private-use character of Unicode is in use",
            field="messages",
        )
    return guard, end_mark


def _mark_end(messages: list[dict[str, Any]], end_mark: str) -> None:
    """Put a mark where the last message's text ends, so that the prompt can be cut there."""
    last = messages[-1] if messages else {}
    field = f"messages[{len(messages) - 1}].content"
    content, reasoning = last.get("content"), last.get("reasoning_content")
    if isinstance(content, str) and content.strip():
        last["content"] = content.rstrip() + end_mark
    elif isinstance(reasoning, str) and last.get("role") == "assistant":
        last["reasoning_content"] = reasoning + end_mark
    else:
        raise invalid(field, "must be text that is not blank to be continued")


def _cut_at(rendered: str, end_mark: str) -> str:
    head, found, _ = rendered.partition(end_mark)
    if not found:
        raise invalid("continue_final_message", "the template does not show the last message")
    return head
