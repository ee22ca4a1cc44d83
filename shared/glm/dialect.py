"""One checkpoint's dialect: its tokenizer, chat template, end tokens and sampling defaults."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.errors import CheckpointError, RequestError
from shared.glm.render import RenderedPrompt, render_chat
from shared.glm.template import ChatTemplate
from shared.glm.tokenizer import GlmTokenizer, Vocabulary
from shared.glm.tokens import ControlTokens


class Dialect:
    """What the frontend needs to know of a checkpoint. Immutable; usable from several threads."""

    def __init__(
        self,
        tokenizer: GlmTokenizer,
        template: ChatTemplate,
        *,
        eos_token_ids: Sequence[int],
        vocab_size: int,
        generation_defaults: Mapping[str, Any],
    ) -> None:
        """Put the parts together; `load` reads them from a checkpoint."""
        self._tokenizer = tokenizer
        self._template = template
        self.eos_token_ids = tuple(eos_token_ids)
        self.vocab_size = vocab_size
        self.generation_defaults: dict[str, Any] = dict(generation_defaults)

    @classmethod
    def load(cls, model_dir: Path) -> "Dialect":
        """Read a checkpoint folder; `CheckpointError` or `ConfigError` names what is wrong."""
        tokenizer = GlmTokenizer.load(model_dir)
        config = _read_json(model_dir / "config.json")
        generation = _read_json(model_dir / "generation_config.json")
        size = config.get("vocab_size")
        known = len(tokenizer.vocabulary)
        if isinstance(size, int) and size < known:
            raise CheckpointError(
                f"{model_dir}: config.json has vocab_size {size}, the tokenizer {known} ids"
            )
        dialect = cls(
            tokenizer,
            ChatTemplate.load(model_dir),
            eos_token_ids=_eos_ids(generation, config, tokenizer.vocabulary, model_dir),
            vocab_size=known,
            generation_defaults=generation,
        )
        dialect._try_template(model_dir)
        return dialect

    def _try_template(self, model_dir: Path) -> None:
        """Render once before any client does: a template that serves nobody ends the start."""
        word, function = "probe-a7", {"name": "probe_b7", "parameters": {"type": "object"}}
        try:
            prompt = self.render_chat(
                [{"role": "user", "content": word}],
                [{"type": "function", "function": function}],
                template_kwargs={},
            )
        except RequestError as error:
            raise CheckpointError(
                f"{model_dir}: the chat template cannot render a question: {error.message}"
            ) from None
        if word not in prompt.text or "probe_b7" not in prompt.text:
            raise CheckpointError(
                f"{model_dir}: the chat template leaves out the user's text or the tools"
            )

    @property
    def control(self) -> ControlTokens:
        """Ids of the control tokens."""
        return self._tokenizer.vocabulary.control

    @property
    def vocabulary(self) -> Vocabulary:
        """Bytes and text of every id."""
        return self._tokenizer.vocabulary

    @property
    def template_argument_names(self) -> frozenset[str]:
        """Names that the chat template reads from chat_template_kwargs."""
        return self._template.argument_names

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        template_kwargs: Mapping[str, Any],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> RenderedPrompt:
        """Chat messages to a prompt.

        Args:
            messages: As in an OpenAI request; raw values, no defaults filled in.
            tools: As in an OpenAI request, shown to the model key for key.
            template_kwargs: Arguments of the template, such as enable_thinking.
            add_generation_prompt: End with the head of an assistant turn.
            continue_final_message: End inside the last message instead.
        """
        return render_chat(
            self._tokenizer,
            self._template,
            messages,
            tools,
            template_kwargs=template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )

    def encode(self, text: str, *, allow_control: bool) -> list[int]:
        """Ids of a text; spellings of control tokens become them only if `allow_control`."""
        return self._tokenizer.encode(text, allow_control=allow_control)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """The text of a run of ids."""
        return self.vocabulary.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_string(self, token_id: int) -> str:
        """A token as its vocabulary writes it; empty for an id without a token."""
        strings = self.vocabulary.token_strings
        return strings[token_id] if 0 <= token_id < len(strings) else ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; empty for an id without a token."""
        table = self.vocabulary.token_bytes
        return table[token_id] if 0 <= token_id < len(table) else b""


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        raise CheckpointError(f"{path}: cannot be read: {exc}") from exc
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return value


def _eos_ids(
    generation: Mapping[str, Any],
    config: Mapping[str, Any],
    vocabulary: Vocabulary,
    model_dir: Path,
) -> list[int]:
    """The union of all configured end ids, the primary first."""
    found: list[int] = []
    for source in (generation, config):
        value = source.get("eos_token_id")
        listed = value if isinstance(value, list) else [value]
        found.extend(i for i in listed if isinstance(i, int) and i not in found)
    unknown = [i for i in found if not 0 <= i < len(vocabulary)]
    if unknown:
        raise CheckpointError(f"{model_dir}: eos_token_id {unknown[0]} is not in the tokenizer")
    return found or [vocabulary.control.end_of_text]
