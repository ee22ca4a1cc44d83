"""Writes a training model as a checkpoint in the exact GLM-5.2 layout.

python -m tools.nano.export .nano/state.pt models/glm-nano
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from tools.nano.config import model_config, write_configs
from tools.nano.model import Nano

FLOAT32 = ("e_score_correction_bias",)
"""Everything else is stored in bfloat16."""


def checkpoint_name(name: str, num_layers: int) -> str:
    """Returns the checkpoint's name of a training parameter; stacked experts keep one name."""
    for ours, theirs in (
        ("mtp.block.", f"layers.{num_layers}."),
        ("mtp.shared_head_norm.", f"layers.{num_layers}.shared_head.norm."),
        ("mtp.", f"layers.{num_layers}."),
    ):
        if name.startswith(ours):
            name = theirs + name.removeprefix(ours)
            break
    return name if name.startswith("lm_head") else f"model.{name}"


def checkpoint_tensors(model: Nano, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Renames a training state to checkpoint names, one tensor per expert."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        target = checkpoint_name(name, model.num_layers)
        stem, _, leaf = target.rpartition(".")
        if stem.endswith(".experts"):
            tensors |= {f"{stem}.{index}.{leaf}.weight": part for index, part in enumerate(tensor)}
        else:
            tensors[target] = tensor
    return {
        name: tensor.to(torch.float32 if name.endswith(FLOAT32) else torch.bfloat16).contiguous()
        for name, tensor in tensors.items()
    }


def load_checkpoint(folder: Path) -> Nano:
    """Reads a checkpoint back into a training model, in float32."""
    tensors = load_file(folder / "model.safetensors")
    model = Nano(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    weights = {}
    for name in model.state_dict():
        stem, _, leaf = checkpoint_name(name, model.num_layers).rpartition(".")
        if stem.endswith(".experts"):
            count = model.config["n_routed_experts"]
            parts = [tensors[f"{stem}.{index}.{leaf}.weight"] for index in range(count)]
            weights[name] = torch.stack(parts).float()
        else:
            weights[name] = tensors[f"{stem}.{leaf}"].float()
    model.load_state_dict(weights)
    return model.eval()


def export(model: Nano, weights: dict[str, Tensor], folder: Path) -> None:
    """Writes config, generation config and weights beside the tokenizer that is already there."""
    write_configs(folder, Tokenizer.from_file(str(folder / "tokenizer.json")))
    tensors = checkpoint_tensors(model, weights)
    path = folder / "model.safetensors"
    save_file(dict(sorted(tensors.items())), path, metadata={"format": "pt"})
    path.chmod(0o644)


def load_state(path: Path) -> dict[str, Any]:
    """Reads a training state."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def main() -> None:
    """Exports the averaged weights of a training state."""
    state, folder = load_state(Path(sys.argv[1])), Path(sys.argv[2])
    model = Nano(model_config(Tokenizer.from_file(str(folder / "tokenizer.json"))))
    export(model, state["average"], folder)


if __name__ == "__main__":
    main()
