"""Writes a training model as a checkpoint in the exact GLM-5.2 layout.

python -m tools.nano.export .nano/state.pt models/glm-nano
"""

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from tools.nano.config import model_config, write_configs
from tools.nano.model import Nano

FLOAT32 = ("e_score_correction_bias",)
"""Everything else is stored in bfloat16."""


def checkpoint_tensors(model: Nano, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Renames a training state to checkpoint names, one tensor per expert."""
    tensors: dict[str, Tensor] = {}
    last = model.num_layers
    for name, tensor in weights.items():
        if name in ("cos", "sin"):
            continue
        target = name if name.startswith("lm_head") else f"model.{name}"
        target = target.replace("model.mtp.block.", f"model.layers.{last}.")
        target = target.replace(
            "model.mtp.shared_head_norm", f"model.layers.{last}.shared_head.norm"
        )
        target = target.replace("model.mtp.", f"model.layers.{last}.")
        stem, _, leaf = target.rpartition(".")
        if stem.endswith(".experts"):
            tensors |= {f"{stem}.{index}.{leaf}.weight": part for index, part in enumerate(tensor)}
        else:
            tensors[target] = tensor
    return {
        name: tensor.to(torch.float32 if name.endswith(FLOAT32) else torch.bfloat16)
        .contiguous()
        .clone()
        for name, tensor in tensors.items()
    }


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
