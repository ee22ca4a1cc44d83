"""Tool calls in the model's own form as a part of a grammar.

    <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call>

Tags are control tokens. Only declared names and keys are possible, each key once, in the order of
the schema, and required ones are there. A string is raw text and ends at its tag, every other value
is JSON of its schema, as the reader of calls takes them apart.
"""

from typing import Final

from services.worker.grammar.argument_values import ValueWriter
from services.worker.grammar.arguments import read_arguments
from services.worker.grammar.writer import ANY_TEXT, GrammarWriter, quoted, refused, token
from shared.constraint import CalledTool, CallRules
from shared.glm.tokens import ControlTokens

_FIELD: Final = "calls"
# Of arguments that a tool takes without declaring them.
_ANY_KEY: Final = r"/[^\s<>]{1,64}/"


def add_calls(writer: GrammarWriter, rules: CallRules, control: ControlTokens) -> str:
    """The part of a grammar that reads the calls of an output: one or more, or exactly one."""
    call = writer.rule(f"{token(control.tool_call)} {add_call_body(writer, rules, control)}")
    return writer.rule(f"{call}+") if rules.is_parallel else call


def add_call_body(writer: GrammarWriter, rules: CallRules, control: ControlTokens) -> str:
    """One call behind its opening tag.

    Raises:
        RequestError: The schema of a tool cannot be used, and why.
    """
    if not rules.tools:
        raise refused(_FIELD, "no tool can be called")
    tools = [_CallWriter(writer, tool, control).add() for tool in rules.tools]
    return writer.rule(f"({' | '.join(tools)}) {token(control.end_tool_call)}")


class _CallWriter:
    """Name and arguments of one tool."""

    def __init__(self, writer: GrammarWriter, tool: CalledTool, control: ControlTokens) -> None:
        self._writer = writer
        self._tool = tool
        self._control = control

    def add(self) -> str:
        """The rule of the call, without its tags."""
        arguments = read_arguments(self._tool)
        is_strict = self._tool.is_strict
        values = ValueWriter(self._writer, arguments.root, is_strict=is_strict)
        parts = [quoted(self._tool.name)]
        for argument in arguments.declared:
            value = values.add(argument)
            if value is not None:
                each = self._argument(quoted(argument.name), value)
                parts.append(each if argument.is_required else f"{each}?")
        if arguments.takes_any:
            each = self._argument(self._writer.terminal(_ANY_KEY), self._writer.terminal(ANY_TEXT))
            parts.append(f"{each}*")
        return self._writer.rule(" ".join(parts))

    def _argument(self, key: str, value: str) -> str:
        control = self._control
        return self._writer.rule(
            f"{token(control.arg_key)} {key} {token(control.end_arg_key)} "
            f"{token(control.arg_value)} {value} {token(control.end_arg_value)}"
        )
