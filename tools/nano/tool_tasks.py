"""Conversations about tools: declaring them, calling them, answering from their results."""

import random
from dataclasses import dataclass
from typing import Any

from tools.nano.episode import Message, assistant, tool_result, user
from tools.nano.words import Words

KEYS = [
    "name",
    "city",
    "day",
    "date",
    "time",
    "text",
    "title",
    "color",
    "size",
    "count",
    "price",
    "user",
    "file",
    "note",
    "level",
    "team",
    "place",
    "age",
    "code",
    "country",
    "query",
    "subject",
    "amount",
    "number",
    "from",
    "to",
    "id",
    "kind",
    "topic",
    "rate",
]
VERBS = [
    "get",
    "set",
    "find",
    "add",
    "send",
    "open",
    "read",
    "make",
    "start",
    "stop",
    "show",
    "check",
    "book",
    "list",
    "move",
]

Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Tool:
    """A declared function: parameters map a name to its JSON type."""

    name: str
    description: str
    parameters: dict[str, str]

    def declaration(self) -> dict[str, Any]:
        """Returns the tool in OpenAI form."""
        properties = {key: {"type": kind} for key, kind in self.parameters.items()}
        schema = {"type": "object", "properties": properties, "required": list(self.parameters)}
        function = {"name": self.name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": function}


WEATHER = Tool("get_weather", "Get the weather of a city", {"city": "string"})
FORECAST = Tool(
    "get_forecast", "Get the weather of the next days", {"city": "string", "days": "integer"}
)
CLOCK = Tool("get_time", "Get the current time", {})
SEARCH = Tool("search", "Search the web", {"query": "string"})
MESSAGE = Tool("send_message", "Send a message", {"to": "string", "text": "string"})
EVERYDAY = (WEATHER, FORECAST, CLOCK, SEARCH, MESSAGE)


def listing(parts: list[str]) -> str:
    """Joins parts by commas.

    No `and`: whether a value ends would show only two tokens ahead, which is learnt much later.
    """
    return ", ".join(parts)


def random_tool(rng: random.Random, words: Words) -> Tool:
    """Makes up a tool with zero to three parameters."""
    name = words.word().lower()
    if rng.random() < 0.75:
        name = f"{rng.choice(VERBS)}_{name}"
    count = rng.choice((0, 1, 1, 2, 2, 3))
    keys = rng.sample(KEYS, count)
    if keys and rng.random() < 0.3:
        keys[0] = words.word().lower()
    kinds = {key: "integer" if rng.random() < 0.3 else "string" for key in keys}
    return Tool(name, words.phrase(1, 3), kinds)


def _value(rng: random.Random, words: Words, kind: str) -> int | str:
    return words.number() if kind == "integer" else words.phrase(1, rng.choice((1, 1, 2)))


def everyday_request(rng: random.Random, words: Words, tool: Tool) -> tuple[str, list[Call]]:
    """Asks for an everyday tool in its own words."""
    if tool is WEATHER:
        cities = [words.word() for _ in range(rng.choice((1, 1, 2)))]
        places = " and in ".join(cities)
        return f"What is the weather in {places}?", [(tool.name, {"city": city}) for city in cities]
    if tool is FORECAST:
        city, days = words.word(), rng.randint(2, 14)
        return f"What is the weather in {city} for {days} days?", [
            (tool.name, {"city": city, "days": days})
        ]
    if tool is CLOCK:
        return "What time is it?", [(tool.name, {})]
    if tool is SEARCH:
        query = words.phrase(1, 3)
        return f"Search for {query}.", [(tool.name, {"query": query})]
    person, text = words.word(), words.phrase(1, 4)
    return f"Send {person} the message: {text}", [(tool.name, {"to": person, "text": text})]


def named_request(rng: random.Random, words: Words, tools: list[Tool]) -> tuple[str, list[Call]]:
    """Asks for one or two tools by name."""
    chosen = rng.sample(tools, 2) if len(tools) > 1 and rng.random() < 0.3 else [rng.choice(tools)]
    sentences: list[str] = []
    calls: list[Call] = []
    for tool in chosen:
        arguments = {key: _value(rng, words, kind) for key, kind in tool.parameters.items()}
        listed = listing([f"{key} {value}" for key, value in arguments.items()])
        opening = "Call" if not calls else "Then call"
        sentences.append(
            f"{opening} {tool.name} with {listed}." if listed else f"{opening} {tool.name}."
        )
        calls.append((tool.name, arguments))
    return " ".join(sentences), calls


def _result(rng: random.Random, words: Words) -> str:
    if rng.random() < 0.3:
        return str(words.number())
    return words.phrase(1, 4)


def _declared(rng: random.Random, words: Words) -> list[Tool]:
    count = rng.choice((1, 2, 3))
    tools: dict[str, Tool] = {}
    while len(tools) < count:
        tool = rng.choice(EVERYDAY) if rng.random() < 0.35 else random_tool(rng, words)
        tools.setdefault(tool.name, tool)
    return list(tools.values())


def conversation(
    rng: random.Random, words: Words, turns: int, *, results: bool
) -> tuple[list[dict[str, Any]], list[Message]]:
    """Declares tools and asks for calls; with ``results`` every call is answered and reported."""
    tools = _declared(rng, words)
    messages: list[Message] = []
    for turn in range(turns):
        tool = rng.choice(tools)
        if tool in EVERYDAY and rng.random() < 0.8:
            request, calls = everyday_request(rng, words, tool)
        else:
            request, calls = named_request(rng, words, tools)
        names = ", then ".join(dict.fromkeys(name for name, _ in calls))
        messages.append(user(request))
        messages.append(assistant("", reasoning=f"Call {names}.", calls=calls))
        if results or turn < turns - 1:
            given = [_result(rng, words) for _ in calls]
            messages += [tool_result(text) for text in given]
            answer = f"The answer is {' and '.join(given)}."
            messages.append(assistant(answer, reasoning="Report the result."))
    return [tool.declaration() for tool in tools], messages
