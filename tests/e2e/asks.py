"""Requests of every kind that the gateway serves, and what their answers say, streamed or not."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tests.e2e.visitors import Answer

CHAT: Final = "/v1/chat/completions"
TEXT: Final = "/v1/completions"
RESPONSES: Final = "/v1/responses"
MESSAGES: Final = "/v1/messages"

_PARAMETERS: Final = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
WEATHER: Final = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": _PARAMETERS},
}
PERSON: Final = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_PLAIN: Final = {"chat_template_kwargs": {"enable_thinking": False}}
_TABLE: Final = "\n".join(f"room{n}: {n * 37 % 1000}" for n in range(60))

Said = list[Any]
"""What an answer says, in the same form for a stream and for a whole object."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, without what every request has and without `stream`."""

    name: str
    path: str
    fields: Mapping[str, Any]

    def body(self, *, is_stream: bool, **more: Any) -> dict[str, Any]:
        """The whole body."""
        common: dict[str, Any] = {"model": "glm-nano", "temperature": 0, "stream": is_stream}
        if is_stream and self.path in {CHAT, TEXT}:
            common["stream_options"] = {"include_usage": True}
        return {**common, **self.fields, **more}


def _chat(name: str, text: str, **fields: Any) -> Ask:
    messages = [{"role": "user", "content": text}]
    return Ask(name, CHAT, {"messages": messages, "max_tokens": 80, **fields})


ASKS: Final = (
    _chat("sum", "What is 47 + 85?", max_tokens=120),
    _chat("repeat", "Repeat: river stone cloud", **_PLAIN),
    _chat("choices", "Repeat: red tree", n=3, **_PLAIN),
    _chat("stop", "Repeat: one house two", stop=["house"], **_PLAIN),
    _chat("first", "Repeat: winter", priority=-5, **_PLAIN),
    _chat("last", "Repeat: summer", priority=9, **_PLAIN),
    _chat("logprobs", "Repeat: a b c", logprobs=True, top_logprobs=3, **_PLAIN),
    _chat("seeded", "Repeat: green hill", temperature=0.9, seed=7, n=2, max_tokens=24),
    _chat("tool", "What is the weather in Oslo?", tools=[WEATHER]),
    _chat("demanded", "What is the weather in Rome?", tools=[WEATHER], tool_choice="required"),
    _chat("look-up", f"{_TABLE}\nWhat is the value of room41?", **_PLAIN),
    _chat(
        "schema",
        "Write JSON with name Bob, age 42.",
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": PERSON, "strict": True},
        },
        **_PLAIN,
    ),
    _chat("choice", "Hello", structured_outputs={"choice": ["yes", "no"]}, **_PLAIN),
    _chat("regex", "Hello", structured_outputs={"regex": "[a-f]{4}-[0-9]{2}"}, **_PLAIN),
    Ask("texts", TEXT, {"prompt": ["red blue", "one two"], "max_tokens": 16, "ignore_eos": True}),
    Ask("echo", TEXT, {"prompt": "stone", "echo": True, "max_tokens": 8, "ignore_eos": True}),
    Ask("response", RESPONSES, {"input": "Repeat: ice field", "max_output_tokens": 60, **_PLAIN}),
    Ask(
        "response tool",
        RESPONSES,
        {
            "input": "What is the weather in Rome?",
            "max_output_tokens": 120,
            "store": False,
            "tools": [
                {"type": "function", "name": "get_weather", "parameters": _PARAMETERS}
                | {"strict": False}
            ],
        },
    ),
    Ask(
        "message",
        MESSAGES,
        {
            "messages": [{"role": "user", "content": "Repeat: wide sea"}],
            "max_tokens": 60,
            "thinking": {"type": "disabled"},
        },
    ),
    Ask(
        "message tool",
        MESSAGES,
        {
            "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
            "max_tokens": 120,
            "tools": [{"name": "get_weather", "input_schema": _PARAMETERS}],
        },
    ),
)


def said(ask: Ask, answer: Answer) -> Said:
    """What an answer says; AssertionError if it is none, or no whole one."""
    assert answer.status == 200, (ask.name, answer)
    read = {CHAT: _chat_said, TEXT: _text_said, RESPONSES: _response_said, MESSAGES: _message_said}
    return read[ask.path](answer)


def _chunks(answer: Answer) -> list[Any]:
    *chunks, done = answer.events()
    assert done == "[DONE]", answer.body[-200:]
    found = [json.loads(chunk) for chunk in chunks]
    assert not any("error" in chunk for chunk in found), found[-1]
    return found


def _chat_said(answer: Answer) -> Said:
    if not answer.is_stream:
        value = answer.value()
        messages = [(choice["message"], choice["finish_reason"]) for choice in value["choices"]]
        return [*(_choice(*each) for each in messages), value["usage"]["completion_tokens"]]
    chunks = _chunks(answer)
    choices: dict[int, Any] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            whole = choices.setdefault(choice["index"], {"message": {}, "reason": None})
            _join(whole["message"], choice["delta"])
            whole["reason"] = choice["finish_reason"] or whole["reason"]
    ordered = [choices[index] for index in sorted(choices)]
    tokens = chunks[-1]["usage"]["completion_tokens"]
    return [*(_choice(each["message"], each["reason"]) for each in ordered), tokens]


def _join(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for name in ("reasoning", "content"):
        message[name] = (message.get(name) or "") + (delta.get(name) or "")
    calls = message.setdefault("tool_calls", [])
    for piece in delta.get("tool_calls") or ():
        if piece["index"] == len(calls):
            calls.append({"function": {"name": piece["function"]["name"], "arguments": ""}})
        call = calls[piece["index"]]["function"]
        call["arguments"] += piece["function"].get("arguments") or ""


def _choice(message: dict[str, Any], reason: str) -> Any:
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    return [message.get("reasoning") or "", message.get("content") or "", calls, reason]


def _text_said(answer: Answer) -> Said:
    if not answer.is_stream:
        value = answer.value()
        choices = [[choice["text"], choice["finish_reason"]] for choice in value["choices"]]
        return [*choices, value["usage"]["completion_tokens"]]
    chunks, found = _chunks(answer), dict[int, list[Any]]()
    for chunk in chunks:
        for choice in chunk["choices"]:
            whole = found.setdefault(choice["index"], ["", None])
            whole[0] += choice["text"]
            whole[1] = choice["finish_reason"] or whole[1]
    return [*(found[index] for index in sorted(found)), chunks[-1]["usage"]["completion_tokens"]]


def _response_said(answer: Answer) -> Said:
    value: Any
    if answer.is_stream:
        events = [json.loads(data) for data in answer.events()]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["type"] in {"response.completed", "response.incomplete"}, events[-1]
        value = events[-1]["response"]
        deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
        texts = [
            item["content"][0]["text"] for item in value["output"] if item["type"] == "message"
        ]
        assert "".join(deltas) == "".join(texts)
    else:
        value = answer.value()
    items = [
        [item["type"], item.get("content"), item.get("name"), item.get("arguments")]
        for item in value["output"]
    ]
    return [*items, value["status"], value["usage"]["output_tokens"]]


def _message_said(answer: Answer) -> Said:
    if not answer.is_stream:
        value = answer.value()
        blocks = [_block(block) for block in value["content"]]
        return [*blocks, value["stop_reason"], value["usage"]["output_tokens"]]
    blocks, last = [], {}
    for event in map(json.loads, answer.events()):
        assert event["type"] != "error", event
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            _add(blocks[event["index"]], event["delta"])
        last = event if event["type"] == "message_delta" else last
    assert event["type"] == "message_stop"
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["json"] or "{}")
    return [*map(_block, blocks), last["delta"]["stop_reason"], last["usage"]["output_tokens"]]


def _add(block: dict[str, Any], delta: dict[str, Any]) -> None:
    fields = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "json"}
    name = fields.get(delta["type"])
    if name is not None:
        block[name] += delta["partial_json" if name == "json" else name]


def _block(block: dict[str, Any]) -> Any:
    kind = block["type"]
    what = {"text": "text", "thinking": "thinking", "tool_use": "input"}[kind]
    return [kind, block[what], block.get("name")]
