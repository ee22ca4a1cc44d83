"""Renders conversations with a checkpoint's chat template, jinja2 set up as transformers does."""

import json
from pathlib import Path
from typing import Any

from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


def _to_json(value: object, *, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, folder: Path) -> None:
        """Compiles ``chat_template.jinja`` of a checkpoint folder."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        source = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        self._template = environment.from_string(source)

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        **kwargs: object,
    ) -> str:
        """Renders messages; ``kwargs`` are the template's switches."""
        return self._template.render(
            messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **kwargs
        )
