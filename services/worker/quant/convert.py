"""Turns a float checkpoint into a quantized one, layer by layer.

In memory are one layer's weights while calibration runs it, then a few matrices that are rounded
side by side, and the tensors of one file of the result.
"""

import logging
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from services.worker.capacity import free_host_bytes
from services.worker.loading.check import check_entries
from services.worker.loading.header import TensorEntry
from services.worker.loading.reader import CheckpointReader
from services.worker.loading.strategy import LoadStrategy
from services.worker.model.config import ModelConfig
from services.worker.model.decoder import Decoder
from services.worker.model.spec import ModelSpec
from services.worker.quant import int4
from services.worker.quant.calibrator import Calibrator
from services.worker.quant.description import KEY_ENTRIES, KEY_TYPE
from services.worker.quant.matrices import (
    QuantizedMatrix,
    quantize_dynamic,
    quantize_int4,
    quantize_static,
    stored_bytes,
)
from services.worker.quant.observer import LayerInputs
from services.worker.quant.recipe import Recipe, layer_of, scheme_of
from services.worker.quant.scheme import Scheme
from services.worker.quant.writer import CheckpointWriter
from shared.errors import ConfigError

_LOG = logging.getLogger(__name__)

_WEIGHT: Final = ".weight"
_DOWN: Final = "down_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be done."""

    spec: ModelSpec
    """The float model."""
    recipe: Recipe
    prompts: Sequence[Sequence[int]] = ()
    """Token ids to calibrate with; none: without calibration."""
    whole_key_layers: frozenset[int] = frozenset()
    """Layers whose indexer keys are not to be kept in eight bits."""
    num_threads: int = 1
    """Matrices that are rounded at the same time, each by one thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionProgress:
    """How far it is."""

    layer: int | None
    """The layer at work; None before and behind the layers."""
    num_bytes: int
    """Bytes of the source that are done."""
    total_bytes: int
    is_calibrating: bool = False


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What was done."""

    source_bytes: int = 0
    target_bytes: int = 0
    num_matrices: dict[Scheme, int] = field(default_factory=dict)
    bytes_by_scheme: dict[Scheme, int] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    """Matrix -> what rounding took away, as a share of the weights' size."""

    def count(self, scheme: Scheme, num_bytes: int, *, is_matrix: bool) -> None:
        """Add tensors that were written."""
        self.num_matrices[scheme] = self.num_matrices.get(scheme, 0) + is_matrix
        self.bytes_by_scheme[scheme] = self.bytes_by_scheme.get(scheme, 0) + num_bytes


Report = Callable[[ConversionProgress], None]


class Conversion:
    """One checkpoint on its way into another."""

    def __init__(self, reader: CheckpointReader, job: Job) -> None:
        """Check the checkpoint against the model.

        Raises:
            CheckpointError: It is not a checkpoint of that model, or cannot be packed.
        """
        self._reader = reader
        self._job = job
        config = job.spec.config
        known = _check(reader, job.spec)
        entries = {name: entry for name, entry in reader.entries().items() if name in known}
        self._groups = _by_layer(entries, config)
        self._schemes = {name: scheme_of(job.recipe, config, name) for name in entries}
        self._total_bytes = sum(entry.num_bytes for entry in entries.values())
        self._done_bytes = 0
        self.outcome = Outcome(source_bytes=self._total_bytes)
        for name, entry in entries.items():
            if self._schemes[name] is Scheme.W4A8_DYNAMIC:
                is_down = _is_down(name)
                int4.check_sizes(f"{reader.path}: {name}", *entry.shape, is_down=is_down)

    def target_bytes(self) -> int:
        """Bytes of all tensors of the result."""
        return sum(
            entry.num_bytes
            if self._schemes[name] is Scheme.FLOAT
            else stored_bytes(self._schemes[name], *entry.shape, is_down=_is_down(name))
            for group in self._groups.values()
            for name, entry in group.items()
        )

    def run(self, writer: CheckpointWriter, report: Report) -> Outcome:
        """Write every tensor; `report` is called before each layer and after each tensor."""
        calibrator: Calibrator | None = None
        if self._job.prompts:
            report(self._progress(None, is_calibrating=True))
            calibrator = Calibrator(
                self._reader, self._job.spec, self._job.recipe, self._job.prompts
            )
        for layer, group in self._groups.items():
            inputs = None
            if calibrator is not None and layer in self._job.spec.placement.layers(
                self._job.spec.config
            ):
                assert layer is not None
                report(self._progress(layer, is_calibrating=True))
                inputs = calibrator.run(layer)
            for name, result in self._quantize_all(group, inputs):
                self._write(writer, name, result)
                self._done_bytes += group[name].num_bytes
                report(self._progress(layer))
        self.outcome.target_bytes = writer.num_bytes
        return self.outcome

    def description_entries(self) -> dict[str, Any]:
        """Keys of the description that tell which layers keep their indexer keys in eight bits.

        The others have an entry too: a description without any means all layers.
        """
        if not self._job.recipe.has_c8:
            return {}
        entries: dict[str, Any] = {"indexer_quant_type": KEY_TYPE}
        for layer, group in self._groups.items():
            prefix = f"model.layers.{layer}.self_attn"
            if f"{prefix}.indexer.wq_b.weight" in group:
                is_whole = layer in self._job.whole_key_layers
                kind = Scheme.FLOAT.value if is_whole else KEY_TYPE
                entries[f"{prefix}{KEY_ENTRIES[0]}"] = kind
        return entries

    def _read(self, group: Mapping[str, TensorEntry]) -> Iterator[tuple[str, Tensor]]:
        num_bytes = sum(entry.num_bytes for entry in group.values())
        strategy = LoadStrategy().resolve(num_bytes, free_host_bytes())
        with closing(self._reader.read_all(dict.fromkeys(group), strategy)) as tensors:
            yield from tensors

    def _quantize_all(
        self, group: Mapping[str, TensorEntry], inputs: LayerInputs | None
    ) -> Iterator[tuple[str, Tensor | QuantizedMatrix]]:
        """What each tensor of a group becomes, in order."""

        def convert(name: str, tensor: Tensor) -> Tensor | QuantizedMatrix:
            scheme = self._schemes[name]
            if scheme is Scheme.FLOAT:
                return tensor
            return _quantize(name.removesuffix(_WEIGHT), tensor, scheme, inputs)

        count = self._job.num_threads
        waiting: deque[tuple[str, Future[Tensor | QuantizedMatrix]]] = deque()
        with ThreadPoolExecutor(count, thread_name_prefix="quantize") as pool:
            for name, tensor in self._read(group):
                waiting.append((name, pool.submit(convert, name, tensor)))
                if len(waiting) > count:
                    first, result = waiting.popleft()
                    yield first, result.result()
            for name, result in waiting:
                yield name, result.result()

    def _write(self, writer: CheckpointWriter, name: str, result: Tensor | QuantizedMatrix) -> None:
        scheme = self._schemes[name]
        if isinstance(result, Tensor):
            writer.add(name, result, scheme)
            is_matrix = result.dim() == 2
            self.outcome.count(scheme, result.nbytes, is_matrix=is_matrix)
            return
        stem = name.removesuffix(_WEIGHT)
        for leaf, part in result.tensors.items():
            writer.add(f"{stem}.{leaf}", part, scheme)
        num_bytes = sum(part.nbytes for part in result.tensors.values())
        self.outcome.count(scheme, num_bytes, is_matrix=True)
        self.outcome.errors[stem] = result.error

    def _progress(self, layer: int | None, *, is_calibrating: bool = False) -> ConversionProgress:
        return ConversionProgress(
            layer=layer,
            num_bytes=self._done_bytes,
            total_bytes=self._total_bytes,
            is_calibrating=is_calibrating,
        )


def _quantize(
    stem: str, weight: Tensor, scheme: Scheme, inputs: LayerInputs | None
) -> QuantizedMatrix:
    if scheme is Scheme.W8A8:
        assert inputs is not None
        return quantize_static(weight, inputs.range_of(stem))
    if scheme is Scheme.W4A8_DYNAMIC:
        moments = None if inputs is None else inputs.moments_of(stem)
        return quantize_int4(weight, moments, is_down=_is_down(stem))
    return quantize_dynamic(weight)


def _is_down(name: str) -> bool:
    return name.removesuffix(_WEIGHT).endswith(_DOWN)


def _check(reader: CheckpointReader, spec: ModelSpec) -> frozenset[str]:
    """Hold the checkpoint against the model; the tensors that make it up."""
    entries = reader.entries()
    mtp = f"model.layers.{spec.config.num_hidden_layers}."
    has_mtp = spec.config.num_nextn_predict_layers > 0
    nowhere = ModelSpec(
        config=spec.config,
        dtype=spec.dtype,
        device=torch.device("meta"),
        has_mtp=has_mtp and any(name.startswith(mtp) for name in entries),
    )
    check_entries(reader.path, entries, nowhere)
    return frozenset(slot.name for slot in Decoder.build(nowhere).slots())


def _by_layer(
    entries: Mapping[str, TensorEntry], config: ModelConfig
) -> dict[int | None, dict[str, TensorEntry]]:
    """Tensors outside the layers, then those of each layer in order."""
    groups: dict[int | None, dict[str, TensorEntry]] = {None: {}}
    groups |= {layer: {} for layer in range(config.num_hidden_layers)}
    for name, entry in entries.items():
        groups.setdefault(layer_of(name), {})[name] = entry
    return groups


def check_space(folder: Path, num_bytes: int) -> None:
    """Refuse to begin what would fill the disk.

    Raises:
        ConfigError: Less is free there than the result takes.
    """
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise ConfigError(
            f"{folder}: has {free / 1e9:.1f} GB free, the result takes {num_bytes / 1e9:.1f} GB"
        )
