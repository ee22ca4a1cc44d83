"""Whatever a model writes under the grammar of its tools is read back as arguments that validate.

Two services meet here: the worker constrains, the detokenizer reads. Schemas are random, and so is
each token, evenly among those that the mask allows.
"""

import json
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.detokenizer.calls import CallRules as ReadingRules
from services.detokenizer.machine import MachineRules, OutputMachine
from services.detokenizer.schema import ArgumentTypes
from services.worker.grammar.compiler import CompiledGrammar, compile_anew
from services.worker.grammar.vocabulary import EngineVocabulary
from shared.constraint import CalledTool, CallRules, Constraint
from shared.glm.tokenizer import GlmTokenizer

NANO = Path("models/glm-nano")
MAX_TOKENS = 400
# From here on the writer takes an end wherever there is one: a random text has none.
TIRED_AFTER = 30


@cache
def tokenizer() -> GlmTokenizer:
    return GlmTokenizer.load(NANO)


@cache
def vocabulary() -> EngineVocabulary:
    return EngineVocabulary(tokenizer())


@dataclass(frozen=True, kw_only=True)
class Call:
    name: str
    arguments: str


def grammar_of(*tools: CalledTool, is_parallel: bool = False) -> CompiledGrammar:
    rules = CallRules(tools=tools, is_required=True, is_parallel=is_parallel)
    return compile_anew(Constraint(calls=rules), vocabulary())


def write(grammar: CompiledGrammar, seed: int) -> list[int]:
    """Random tokens up to the end of the calls; empty if there is none within bounds."""
    matcher, choose = grammar.matcher(), random.Random(seed)
    control = vocabulary().control
    strings = tokenizer().vocabulary.token_strings
    found: list[int] = []
    while len(found) < MAX_TOKENS:
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        assert not matcher.is_error(), matcher.get_error()
        ids = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
        if control.end_of_text in ids:
            ids.remove(control.end_of_text)
            if not ids or len(found) > TIRED_AFTER:
                return found
        assert ids, "a text that cannot go on"
        if len(found) > TIRED_AFTER:
            tags = [i for i in ids if i in (control.end_arg_value, control.end_tool_call)]
            ends = [i for i in ids if strings[i][:1] in ('"', "]", "}")]
            ids = tags or ends or ids
        token = choose.choice(ids)
        assert matcher.consume_token(token)
        found.append(token)
    return []


def read(ids: list[int], schemas: dict[str, Any]) -> list[Call]:
    """The calls as a client gets them."""
    tools = {name: ArgumentTypes(schema) for name, schema in schemas.items()}
    rules = ReadingRules(tools=tools, allowed=frozenset(tools))
    machine = OutputMachine(
        tokenizer().vocabulary,
        MachineRules(calls=rules, starts_in_reasoning=False),
        make_id=lambda: "id",
    )
    for token in ids:
        machine.push(token)
    machine.finish(is_cut=False)
    delta = machine.take()
    assert not delta.content
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for piece in delta.tools:
        if piece.name:
            names[piece.index] = piece.name
        arguments[piece.index] = arguments.get(piece.index, "") + piece.arguments
    return [Call(name=names[i], arguments=arguments[i]) for i in sorted(names)]


def check(schema: dict[str, Any], seed: int, *, is_strict: bool) -> int:
    """Write and read three calls; how many came to their end."""
    tool = CalledTool(name="f", parameters_json=json.dumps(schema), is_strict=is_strict)
    grammar = grammar_of(tool)
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    count = 0
    for each in range(seed, seed + 3):
        ids = write(grammar, each)
        if not ids:
            continue
        (call,) = read(ids, {"f": schema})
        value = json.loads(call.arguments)
        errors = [f"{e.instance_path}: {e.message}" for e in validator.iter_errors(value)]
        assert not errors, (schema, call.arguments, errors)
        assert is_strict or set(value) <= set(schema["properties"])
        count += 1
    return count


# ---- schemas ----
# None takes any number inside an array or object: random digits soon make one that no double holds,
# and its reader takes the whole value for a text (docs/http-api.md).

TEXTS = st.sampled_from(
    [
        {"type": "string"},
        {"type": "string", "pattern": "^[a-z]{2,5}$"},
        {"type": "string", "pattern": "[0-9]"},
        {"type": "string", "minLength": 1, "maxLength": 5},
        {"type": "string", "enum": ["on", "off", "null", "1", "{x"]},
        {"const": "fixed"},
        {"type": "string", "const": "true"},
        *(
            {"type": "string", "format": name}
            for name in (
                *("date", "time", "date-time", "duration", "email", "hostname"),
                *("ipv4", "ipv6", "uuid"),
            )
        ),
    ]
)
BOUNDED_NUMBERS = [
    {"type": "integer"},
    {"type": "integer", "minimum": 3, "maximum": 40},
    {"type": "integer", "exclusiveMinimum": 0, "multipleOf": 5},
    {"type": "number", "minimum": -1.5, "maximum": 2.25},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
]
OTHERS = st.sampled_from(
    [
        *BOUNDED_NUMBERS,
        {"type": "boolean"},
        {"type": "null"},
        {"enum": [1, 2.5, None, True, {"a": [1]}]},
        {"const": 7},
        {"type": ["integer", "null"]},
        {"type": ["boolean", "null"]},
    ]
)
MIXED = st.sampled_from(
    [
        {"type": ["string", "null"]},
        {"type": ["string", "null"], "pattern": "^n[a-z]*$"},
        {"type": ["string", "integer"], "minimum": 5, "maxLength": 4},
        {"type": ["string", "null"], "enum": ["a", "null", None]},
        {"enum": ["a", "1", 1, "x y"]},
        {
            "type": ["string", "object", "array", "boolean"],
            "maxLength": 3,
            "items": {"type": "boolean"},
            "properties": {"k": {"type": "string"}},
            "additionalProperties": False,
        },
        {"$ref": "#/$defs/word"},
        {"$ref": "#/$defs/maybe_word"},
        {"$ref": "#/$defs/tree"},
        {"anyOf": [{"$ref": "#/$defs/word"}, {"$ref": "#/$defs/tree"}, {"type": "null"}]},
        {"allOf": [{"type": "string", "minLength": 2}, {"pattern": "^[ab]+$"}]},
    ]
)
TOP_LEVEL = st.sampled_from(
    [
        {"type": "number"},
        {"type": ["number", "null"]},
        {"type": ["number", "string"]},
        {"anyOf": [{"type": "number"}, {"type": "string", "format": "date"}]},
        {},
        {"description": "anything"},
        {"anyOf": [{"enum": ["a", "b"]}, {"type": "null"}]},
        {"anyOf": [{"const": 1}, {"const": "1"}, {"const": "one"}]},
    ]
)
DEFS = {
    "word": {"type": "string", "pattern": "^[a-z]+$"},
    "maybe_word": {"anyOf": [{"$ref": "#/$defs/word"}, {"type": "null"}]},
    "tree": {
        "type": "object",
        "properties": {
            "value": {"type": "integer"},
            "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
        },
        "required": ["value", "children"],
        "additionalProperties": False,
    },
}
NAMES = st.lists(
    st.sampled_from(["a", "b", "long_name", "c d", "ключ", "$ref", "type"]),
    min_size=1,
    max_size=3,
    unique=True,
)


def objects(values: st.SearchStrategy[Any], *, is_open: bool = False) -> st.SearchStrategy[Any]:
    @st.composite
    def build(draw: st.DrawFn) -> dict[str, Any]:
        names = draw(NAMES)
        required = draw(st.lists(st.sampled_from(names), unique=True)) if is_open else names
        return {
            "type": "object",
            "properties": {name: draw(values) for name in names},
            "required": required,
            **({} if is_open else {"additionalProperties": False}),
        }

    return build()


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    arrays = st.builds(
        lambda item, least: {"type": "array", "items": item, "minItems": least, "maxItems": 3},
        inner,
        st.integers(0, 2),
    )
    unions = st.builds(lambda *each: {"anyOf": list(each)}, inner, inner)
    return st.one_of(arrays, objects(inner), unions)


VALUES = st.one_of(
    st.recursive(st.one_of(TEXTS, OTHERS, MIXED), nested, max_leaves=4), TOP_LEVEL, TEXTS
)


def with_definitions(schema: dict[str, Any]) -> dict[str, Any]:
    return {**schema, "$defs": DEFS}


# Patterns, formats and lengths of texts are enforced for strict tools alone.
LAX_VALUES = st.one_of(
    OTHERS,
    TOP_LEVEL.filter(lambda schema: "format" not in json.dumps(schema)),
    st.sampled_from(
        [
            {"type": "string"},
            {"enum": ["a", "1", 1, "x y"]},
            {"type": ["string", "null"]},
            {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 5}]},
            {"$ref": "#/$defs/tree"},
            {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
        ]
    ),
)


@settings(max_examples=100, deadline=None)
@given(schema=objects(VALUES).map(with_definitions), seed=st.integers(0, 2**32))
def test_a_strict_call_always_validates(schema: dict[str, Any], seed: int) -> None:
    check(schema, seed, is_strict=True)


@settings(max_examples=50, deadline=None)
@given(schema=objects(LAX_VALUES, is_open=True).map(with_definitions), seed=st.integers(0, 2**32))
def test_a_lax_call_validates_but_for_what_is_said_of_its_texts(
    schema: dict[str, Any], seed: int
) -> None:
    check(schema, seed, is_strict=False)


def test_nearly_every_random_writer_comes_to_its_end() -> None:
    """Else the promises above would be empty."""
    properties = {"city": {"type": "string"}, "days": {"type": "integer"}, "tree": DEFS["tree"]}
    schema = with_definitions(
        {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }
    )
    assert sum(check(schema, seed, is_strict=True) for seed in range(0, 60, 3)) > 45


@pytest.mark.parametrize("is_parallel", [True, False])
def test_random_calls_are_of_declared_tools_and_as_many_as_allowed(is_parallel: bool) -> None:
    schemas: dict[str, Any] = {
        "f": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
        "find": {"type": "object", "properties": {"y": {"enum": ["a", None]}}},
        "now": {"type": "object", "properties": {}},
    }
    tools = [CalledTool(name=n, parameters_json=json.dumps(s)) for n, s in schemas.items()]
    grammar = grammar_of(*tools, is_parallel=is_parallel)
    counts = set()
    for seed in range(60):
        calls = read(write(grammar, seed), schemas)
        counts.add(len(calls))
        for call in calls:
            jsonschema_rs.validate(schemas[call.name], json.loads(call.arguments))
    assert counts == {1} if not is_parallel else max(counts) > 1


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60))
@example("</arg_value></tool_call><tool_call>f")
@example('"quoted" \\n { [ null 1.5')
@example(" \t\n leading and trailing \r\n ")
def test_a_text_argument_can_be_any_text_and_comes_back_as_it_is(text: str) -> None:
    schema = {"type": "object", "properties": {"t": {"type": "string"}}, "required": ["t"]}
    tool = CalledTool(name="f", parameters_json=json.dumps(schema), is_strict=True)
    encode, control = tokenizer().encode, vocabulary().control
    ids = [control.tool_call, *encode("f", allow_control=False)]
    ids += [control.arg_key, *encode("t", allow_control=False), control.end_arg_key]
    ids += [control.arg_value, *encode(text, allow_control=False)]
    ids += [control.end_arg_value, control.end_tool_call]
    matcher = grammar_of(tool).matcher()
    assert matcher.try_consume_tokens(ids) == len(ids)
    assert matcher.is_accepting()
    (call,) = read(ids, {"f": schema})
    assert json.loads(call.arguments) == {"t": text}
