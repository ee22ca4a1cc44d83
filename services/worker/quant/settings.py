"""Settings of `glm-mesh quantize`."""

import re
from pathlib import Path
from typing import Annotated, ClassVar, Final

from pydantic import AfterValidator, Field, model_validator
from pydantic_settings import CliPositionalArg

from services.worker.quant.recipe import SchemeName
from shared.config import ProcessSettings

_RANGE: Final = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")
# A model of hundreds of layers is not in sight; more is a slip of the keyboard.
_MAX_LAYERS: Final = 10_000


def read_layers(text: str) -> frozenset[int] | None:
    """Layers of a text like `0-4,74-78`; `none` is no layer, `auto` None.

    Raises:
        ValueError: It is something else.
    """
    if text == "auto":
        return None
    layers: set[int] = set()
    for word in text.split(",") if text != "none" else ():
        match = _RANGE.fullmatch(word.strip())
        if match is None:
            raise ValueError("must be numbers and ranges of layers, like 0-4,78, or none or auto")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < _MAX_LAYERS:
            raise ValueError(f"{word} must be a range of layers below {_MAX_LAYERS}")
        layers.update(range(first, last + 1))
    return frozenset(layers)


def _check_layers(text: str) -> str:
    read_layers(text)
    return text


class QuantizeSettings(ProcessSettings):
    """Turn a float checkpoint into a quantized one in ModelSlim's format."""

    service: ClassVar[str] = "quantize"

    src: CliPositionalArg[Path] = Field(description="Directory of the float checkpoint.")
    dst: CliPositionalArg[Path] = Field(description="Directory to write; must not exist yet.")
    scheme: SchemeName = Field(
        description="w8a8: int8 weights and activations; w8a8c8: and 8-bit indexer keys; w4a8c8: "
        "and int4 weights of routed experts."
    )
    calibration: Path | None = Field(
        default=None,
        description="Prompts to calibrate with, one on each line: chats, texts or token ids as "
        "JSON in a .jsonl file, else plain texts. Default: calibration.jsonl of SRC if it has one; "
        "required by w8a8 and w8a8c8.",
    )
    calibration_tokens: int = Field(
        default=16_384, ge=1, description="Tokens to calibrate with; prompts beyond are left out."
    )
    c8_skip_layers: Annotated[str, AfterValidator(_check_layers)] = Field(
        default="auto",
        description="Layers whose indexer keys are not kept in eight bits, like 0-4,74-78, or "
        "none; auto: five at either end of a deep model, as ModelSlim's recipes for GLM.",
    )
    max_shard_bytes: int = Field(
        default=4 << 30, ge=1, description="Largest file of weights; one tensor may be larger."
    )
    overwrite: bool = Field(default=False, description="Replace a checkpoint that is at DST.")
    num_threads: int = Field(default=0, ge=0, description="Threads; 0: one per core.")

    @model_validator(mode="after")
    def _check_places(self) -> "QuantizeSettings":
        source, target = self.src.resolve(), self.dst.resolve()
        if source == target:
            raise ValueError(f"SRC and DST are the same directory, {source}")
        if source in target.parents or target in source.parents:
            raise ValueError(f"one of SRC {source} and DST {target} lies inside the other")
        return self
