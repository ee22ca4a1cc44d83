"""What one token costs the output machine inside a long tool argument, one token per delta.

Measured is the way from a token id to the delta of its step, averaged over the last tenth, where a
cost that grows with the length would show. The peer's numbers are vLLM 0.32's composed parser on
the same kind of machine, per delta, over the last tenth (2k / 8k / 32k tokens). `us_per_frame` adds
what follows: counting, stop checks and the finished SSE frame.

    python -m benchmarks.output_machine [--model models/glm-nano]
"""

import argparse
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path

from services.detokenizer.build import BuildContext, build_presenter, build_response, make_call_id
from services.detokenizer.calls import CallRules
from services.detokenizer.machine import MachineRules, OutputMachine
from services.detokenizer.messages import (
    ObjectKind,
    OutputSpec,
    SequenceSpec,
    TextSubmit,
    ToolChoice,
    ToolSpec,
)
from services.detokenizer.schema import ArgumentTypes
from shared.glm.dialect import Dialect
from shared.sampling import SamplingSpec
from shared.wire import pack_ids

SCHEMA = {
    "properties": {
        "path": {"type": "string"},
        "content": {"type": "string"},
        "numbers": {"type": "array", "items": {"type": "integer"}},
    }
}
HEAD = "</think><tool_call>write_file<arg_key>{key}</arg_key><arg_value>"
TAIL = "</arg_value></tool_call>"
SHAPES = {
    "one long string argument": ("content", "line of code = value + 1;\n", 818, 3178, 12290),
    "one long integer-array argument": ("numbers", "123, 45, 6789, ", 190, 657, 2698),
}
SIZES = (2_048, 8_192, 32_768)
MUST_US, AIM_US = 10.0, 3.0


def tokens_of(dialect: Dialect, key: str, line: str, count: int) -> list[int]:
    """The output that writes an argument of `count` tokens."""
    unit = dialect.encode(line, allow_control=False)
    body = (unit * (count // len(unit) + 1))[:count]
    head = dialect.encode(HEAD.format(key=key), allow_control=True)
    return [*head, *body, *dialect.encode(TAIL, allow_control=True)]


def last_tenth_us(step: Callable[[int], object], tokens: list[int]) -> float:
    """Mean microseconds per token of the last tenth."""
    cut = len(tokens) - len(tokens) // 10
    for token in tokens[:cut]:
        step(token)
    before = time.perf_counter_ns()
    for token in tokens[cut:]:
        step(token)
    return (time.perf_counter_ns() - before) / 1000 / (len(tokens) - cut)


def machine_us(dialect: Dialect, tokens: list[int]) -> float:
    """The machine alone."""
    rules = MachineRules(
        calls=CallRules(
            tools={"write_file": ArgumentTypes(SCHEMA)}, allowed=frozenset({"write_file"})
        ),
        starts_in_reasoning=True,
    )
    machine = OutputMachine(dialect.vocabulary, rules, make_id=make_call_id)

    def step(token: int) -> None:
        machine.push(token)
        machine.take()

    return last_tenth_us(step, tokens)


def frame_us(dialect: Dialect, tokens: list[int]) -> float:
    """Everything from a token id to the bytes of its frame."""
    spec = OutputSpec(
        object_kind=ObjectKind.CHAT_COMPLETION,
        response_id="chatcmpl-0123456789abcdef",
        model="glm-nano",
        is_stream=True,
        starts_in_reasoning=True,
        stop=("<END>",),
        tools=(ToolSpec(name="write_file", parameters=SCHEMA),),
        tool_choice=ToolChoice.AUTO,
    )
    context = BuildContext(
        vocabulary=dialect.vocabulary,
        fingerprint="benchmark",
        max_timeout_ms=60_000,
        make_call_id=make_call_id,
    )
    submit = TextSubmit(
        request_id="r",
        sequences=(SequenceSpec(index=0, prompt_token_ids=pack_ids([1])),),
        sampling=SamplingSpec(eos_token_ids=dialect.eos_token_ids),
        output=spec,
    )
    response = build_response(submit, context, 0.0)
    presenter = build_presenter(response, spec, context)
    choice = response.choices[0]

    def step(token: int) -> None:
        choice.feed((token,), None)
        presenter.render(response.choices)

    return last_tenth_us(step, tokens)


def main(argv: list[str] | None = None) -> int:
    """One JSON line per shape and size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/glm-nano"))
    parser.add_argument("--repeat", type=int, default=5, help="best of so many runs")
    args = parser.parse_args(argv)
    dialect = Dialect.load(args.model)
    gc.disable()
    for shape, (key, line, *peers) in SHAPES.items():
        for size, peer_us in zip(SIZES, peers, strict=True):
            tokens = tokens_of(dialect, key, line, size)
            cost_us = min(machine_us(dialect, tokens) for _ in range(args.repeat))
            whole_us = min(frame_us(dialect, tokens) for _ in range(args.repeat))
            report = {
                "claim": f"output machine, {shape}",
                "tokens": size,
                "us_per_token": round(cost_us, 2),
                "us_per_frame": round(whole_us, 2),
                "peer_us": peer_us,
                "ratio": round(cost_us / peer_us, 6),
                "target": {"must_us": MUST_US, "aim_us": AIM_US},
                "is_met": cost_us <= MUST_US,
            }
            print(json.dumps(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
