"""Drive one response of any kind of object over token ids and read what the client would."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.detokenizer.assemble import Presenter
from services.detokenizer.build import build_presenter, build_response
from services.detokenizer.messages import ObjectKind
from shared.endings import FinishReason
from tests.services.detokenizer.frames import CONTEXT, SPECS, finished, logprobs, submit
from tests.services.detokenizer.words import EOS, ids

CALL = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>"
THOUGHT_TEXT_CALLS = f"R 1</think>Hi\n{CALL}<tool_call>now</tool_call>"


@dataclass
class Driven:
    """Everything that was sent, and what was kept."""

    data: bytes
    presenter: Presenter

    @property
    def body(self) -> Any:
        return json.loads(self.data)

    @property
    def events(self) -> list[dict[str, Any]]:
        """Named events; the name is that of the document."""
        parts = self.data.decode().split("\n\n")
        assert parts.pop() == ""
        found = []
        for part in parts:
            name, data = part.split("\n")
            document = json.loads(data.removeprefix("data: "))
            assert name == f"event: {document['type']}"
            found.append(document)
        return found

    @property
    def kinds(self) -> list[str]:
        return [event["type"] for event in self.events]


def drive(
    kind: ObjectKind,
    output: str | Sequence[int],
    *,
    reason: FinishReason = FinishReason.STOP,
    groups: Sequence[int] = (1,),
    rendered_every: int = 1,
    num_cached_tokens: int = 0,
    **options: Any,
) -> Driven:
    """`rendered_every` groups the reader takes what waits, and at the end."""
    options = {"tools": SPECS, "starts_in_reasoning": True, **options}
    request = submit(object_kind=kind, **options)
    response = build_response(request, CONTEXT, 0.0)
    presenter = build_presenter(response, request.output, CONTEXT)
    choice, data, start, number = response.choices[0], b"", 0, 0
    tokens = list(ids(output) if isinstance(output, str) else output)
    tokens += [EOS] if reason is FinishReason.STOP else []
    while start < len(tokens):
        piece = tokens[start : start + groups[number % len(groups)]]
        start, number = start + len(piece), number + 1
        wanted = request.output.include_logprobs
        choice.feed(piece, logprobs(len(piece)) if wanted else None)
        if number % rendered_every == 0:
            data += presenter.render(response.choices)
    choice.finish(finished(reason, num_cached_tokens=num_cached_tokens))
    data += presenter.render(response.choices)
    assert presenter.render(response.choices) == b""
    return Driven(data, presenter)
