"""Holds the headers of a checkpoint against the model that is to be made of it."""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from services.worker.loading.header import TensorEntry
from services.worker.loading.layout import fail_with
from services.worker.model.config import ModelConfig
from services.worker.model.decoder import Decoder
from services.worker.model.mtp import MTPLayer
from services.worker.model.placement import Placement
from services.worker.model.slots import WeightSlot
from services.worker.model.spec import ModelSpec

_LOG = logging.getLogger(__name__)

# The final norm's gamma in the rotated basis of a QuaRot checkpoint; only drafts use it.
_ROTATION = "rot."
_FIRST_EXPERT = ".experts.0."
_INDEXER = re.compile(r"model\.layers\.(\d{1,6})\.self_attn\.indexer\.(.+)")
# Rotations that the cache operators apply themselves, a fixed one to queries and keys alike.
_INDEXER_ROTATIONS = frozenset({"q_rot", "k_rot"})


def check_entries(path: Path, entries: Mapping[str, TensorEntry], spec: ModelSpec) -> None:
    """Compare the whole checkpoint with the whole model, whatever this rank keeps of it.

    Tensors that no model is made of are left in their files, with a line that says so.

    Args:
        path: The directory, for messages about what is in no file.
        entries: What is there.
        spec: A rank's model; the device is not touched.

    Raises:
        CheckpointError: Lists every tensor that is missing, extra, misshapen, mistyped, or not
            described as it should be.
    """
    known = _whole_model(entries, spec)
    faults = [
        f"{path}: {name}: is missing"
        for name, slot in sorted(known.items())
        if slot.is_required and name not in entries
    ]
    dropped: dict[str, int] = {}
    for name, entry in sorted(entries.items()):
        reason = None if name in known else _reason_to_drop(name, spec.config)
        if reason is None:
            where = f"{entry.file.path}: {name}"
            faults.extend(f"{where}: {fault}" for fault in _faults(entry, known.get(name)))
        else:
            dropped[reason] = dropped.get(reason, 0) + 1
    faults.extend(spec.quantization.find_faults(entries.keys()))
    fail_with(faults)
    for reason, count in dropped.items():
        _LOG.info("left %d tensors unread: %s", count, reason)
    has_layer = any(name.startswith(_mtp_prefix(spec.config)) for name in entries)
    if has_layer and not spec.has_mtp:
        _LOG.info("left the MTP layer unread: drafting is off")


def _whole_model(entries: Mapping[str, TensorEntry], spec: ModelSpec) -> dict[str, WeightSlot]:
    """Every tensor that the checkpoint may hold for the model.

    Experts are alike and most of all tensors: of each layer the first one is built, and stands for
    the others.
    """
    count = spec.config.n_routed_experts
    placement = Placement(ep_size=count)
    whole = replace(spec, placement=placement, device=torch.device("meta"))
    known = _with_all_experts(Decoder.build(whole).slots(), count)
    has_layer = any(name.startswith(_mtp_prefix(spec.config)) for name in entries)
    if spec.config.num_nextn_predict_layers and has_layer:
        known |= _with_all_experts(MTPLayer(whole).slots(), count)
    return known


def _with_all_experts(slots: Iterable[WeightSlot], count: int) -> dict[str, WeightSlot]:
    """Slots by name, those of the first expert also by the names of the others."""
    known: dict[str, WeightSlot] = {}
    for slot in slots:
        before, mark, behind = slot.name.partition(_FIRST_EXPERT)
        names = [f"{before}.experts.{at}.{behind}" for at in range(count)] if mark else [slot.name]
        known |= dict.fromkeys(names, slot)
    return known


def _mtp_prefix(config: ModelConfig) -> str:
    return f"model.layers.{config.num_hidden_layers}."


def _reason_to_drop(name: str, config: ModelConfig) -> str | None:
    """Why a tensor outside the model is no fault, if it is none."""
    if name.startswith(_ROTATION):
        return "the rotation of drafts"
    found = _INDEXER.fullmatch(name)
    if found is None or int(found.group(1)) >= config.num_hidden_layers:
        return None
    if not config.has_indexer(int(found.group(1))):
        return "indexers of layers that share another's selection"
    if found.group(2) in _INDEXER_ROTATIONS:
        return "rotations of the index heads"
    return None


def _faults(entry: TensorEntry, expected: WeightSlot | None) -> Iterator[str]:
    if expected is None:
        yield "is not part of this model"
        return
    if entry.shape != expected.shape:
        yield f"has shape {list(entry.shape)}, must be {list(expected.shape)}"
    if entry.type_name not in expected.types:
        yield f"has type {entry.type_name}, must be one of {', '.join(sorted(expected.types))}"
