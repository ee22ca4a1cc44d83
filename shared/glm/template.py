"""The checkpoint's own chat template, run in the environment it was written for.

Templates are written against the environment of transformers: a sandbox with blocks trimmed, loop
controls, `tojson` that keeps HTML characters, `raise_exception` and `strftime_now`. The same
settings give the same bytes; transformers itself is too heavy to import here and is the oracle of
the tests instead.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from shared.errors import CheckpointError, FailureReason, RequestError

_OWN_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class _GenerationBlock(jinja2.ext.Extension):
    """Accepts `{% generation %}` blocks, which mark text for training and print it unchanged."""

    tags = {"generation"}  # noqa: RUF012  (the name and type that jinja2 asks for)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Replace the block by its body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template and the special-token variables it may use."""

    def __init__(self, source: str, variables: Mapping[str, str], *, name: str) -> None:
        """Compile; `CheckpointError` with the line when the template is broken."""
        environment = _build_environment()
        try:
            names = jinja2.meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as exc:
            raise CheckpointError(f"{name}: line {exc.lineno}: {exc.message}") from exc
        self._variables = dict(variables)
        self.argument_names: frozenset[str] = frozenset(
            names - _OWN_NAMES - set(_SPECIAL_TOKENS) - set(environment.globals)
        )

    @classmethod
    def load(cls, model_dir: Path) -> "ChatTemplate":
        """Read chat_template.jinja and the special tokens of tokenizer_config.json."""
        path = model_dir / "chat_template.jinja"
        try:
            source = path.read_text("utf-8")
        except (OSError, ValueError) as exc:
            raise CheckpointError(f"{path}: cannot be read: {exc}") from exc
        return cls(source, _read_special_tokens(model_dir), name=str(path))

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        *,
        add_generation_prompt: bool,
        arguments: Mapping[str, Any],
    ) -> str:
        """The prompt text; a template that refuses its input ends in a `RequestError`."""
        try:
            return self._template.render(
                **{**self._variables, **arguments},
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except jinja2.TemplateError as exc:
            raise _refuse(f"the chat template refuses the messages: {exc}") from exc
        except (
            ArithmeticError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            RecursionError,
        ) as exc:
            raise _refuse("the chat template cannot render the messages") from exc


def _refuse(message: str) -> RequestError:
    return RequestError(FailureReason.INVALID_ARGUMENT, message, field="messages")


def _build_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
        autoescape=False,  # a prompt is not HTML
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,  # noqa: ANN401  (any JSON value)
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _read_special_tokens(model_dir: Path) -> dict[str, str]:
    path = model_dir / "tokenizer_config.json"
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        raise CheckpointError(f"{path}: cannot be read: {exc}") from exc
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: must hold one JSON object")
    found = {}
    for name in _SPECIAL_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found
