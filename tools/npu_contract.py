"""Holds the model against a real torch_npu wheel on a machine without an NPU.

    pip download torch_npu==2.13.0 --no-deps -d DIR
    python tools/npu_contract.py DIR/torch_npu-2.13.0-*.whl

The wheel imports beside torch 2.13.0 if the CANN libraries it links to are there as stubs. In a
child process with such stubs: every pinned schema equals the wheel's, a decoder step on meta
tensors passes the wheel's own shape functions, and a step runs our CPU kernels behind the wheel's
schemas. The wheel is unpacked into a scratch folder and never installed: with torch_npu installed
and no CANN, ``import torch`` itself fails.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STUBS = ("libhccl", "libacl_op_compiler", "libacl_tdt_channel", "libge_runner", "libgraph")
SYMBOL_STUB = "libascendcl"
TINY = {
    "model_type": "glm_moe_dsa",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "q_lora_rank": 48,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "index_n_heads": 8,
    "index_head_dim": 128,
    "index_topk": 16,
    "indexer_types": ["full", "shared", "full"],
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


def main(wheel: Path) -> int:
    """Unpack, stub, and run the checks in a child."""
    with tempfile.TemporaryDirectory() as scratch:
        package = Path(scratch) / "wheel"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(package)
        stubs = Path(scratch) / "stubs"
        stubs.mkdir()
        build_stubs(package, stubs)
        environment = {
            name: value for name, value in os.environ.items() if name != "ASCEND_HOME_PATH"
        }
        environment |= {
            "LD_LIBRARY_PATH": str(stubs),
            "PYTHONPATH": f"{package}{os.pathsep}{ROOT}",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        }
        command = [sys.executable, __file__, "--check"]
        return subprocess.run(command, env=environment, check=False).returncode


def build_stubs(package: Path, target: Path) -> None:
    """One library in which every symbol that nobody defines returns 0, and empty ones."""
    ours = [
        *package.glob("torch_npu/lib/*.so"),
        *package.glob("torch_npu/_C*.so"),
    ]
    torch_lib = Path(sysconfig.get_paths()["purelib"]) / "torch" / "lib"
    python_lib = Path(sysconfig.get_config_var("LIBDIR"))
    defined = _symbols("--defined-only", [*ours, *torch_lib.glob("*.so*"), *_system_libraries()])
    defined |= _symbols("--defined-only", list(python_lib.glob("libpython3*.so*")))
    missing = _symbols("--undefined-only", ours) - defined
    names = sorted(name for name in missing if re.fullmatch(r"(?!_?Py|__|_ITM)[A-Za-z_]\w*", name))
    source = "".join(f"long {name}(void) {{ return 0; }}\n" for name in names)
    _compile(source, target / f"{SYMBOL_STUB}.so")
    for name in STUBS:
        _compile("", target / f"{name}.so")


def _system_libraries() -> list[Path]:
    listed = subprocess.run(
        ["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True
    ).stdout
    wanted = r"(?:libc|libm|libdl|libpthread|librt|libgcc_s|libstdc\+\+)\.so\.\d+ .*=> (\S+)"
    return [Path(path) for path in re.findall(wanted, listed)]


def _symbols(which: str, libraries: list[Path]) -> set[str]:
    names = set()
    for library in libraries:
        listed = subprocess.run(
            ["nm", "-D", which, str(library)], capture_output=True, text=True, check=False
        ).stdout
        names.update(line.split()[-1].split("@")[0] for line in listed.splitlines() if line)
    return names


def _compile(source: str, target: Path) -> None:
    command = ["gcc", "-w", "-shared", "-fPIC", "-x", "c", "-", "-o", str(target)]
    subprocess.run(command, input=source, text=True, check=True)


def check() -> None:
    """The checks themselves; torch_npu is imported first, as the worker does on an NPU."""
    import torch  # noqa: PLC0415 - the parent process runs without it
    import torch_npu  # noqa: F401, PLC0415 - registers the schemas

    from services.worker import ops  # noqa: PLC0415
    from services.worker.ops.schemas import SCHEMAS  # noqa: PLC0415

    for name, pinned in SCHEMAS.items():
        real = getattr(torch.ops.npu, name).default._schema
        if real != torch._C.parse_schema(f"npu::{pinned}"):
            raise SystemExit(f"{name}: the wheel says {real}")
    print(f"{len(SCHEMAS)} schemas equal the wheel's")
    ops.register()
    for device in ("meta", "cpu"):
        shape = _run_step(device)
        print(f"a step on {device} gives logits {shape}")


def _run_step(device: str) -> tuple[int, ...]:
    import torch  # noqa: PLC0415

    from services.worker import kv_cache  # noqa: PLC0415
    from services.worker.model.config import ModelConfig  # noqa: PLC0415
    from services.worker.model.decoder import Decoder  # noqa: PLC0415
    from services.worker.model.metadata import StepMetadata  # noqa: PLC0415

    config = ModelConfig.from_dict(TINY)
    decoder = Decoder.build(config, torch.bfloat16, device)
    if device == "cpu":
        for slot in decoder.slots():
            slot.store(torch.randn(slot.shape) * 0.1)

    def int32(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    positions = torch.tensor([0, 1, 2, 3, 0, 1], device=device)
    step = StepMetadata(
        num_tokens=6,
        positions=positions,
        slot_mapping=int32(128, 129, 130, 131, 256, 257),
        cum_query_lens=int32(4, 6),
        seq_lens=int32(4, 2),
        block_table=int32(1, 2).view(2, 1),
    )
    caches = kv_cache.allocate(config, 4, torch.bfloat16, device)
    logits = decoder.compute_logits(decoder.forward(positions, step, caches))
    if device == "cpu" and not bool(logits.isfinite().all()):
        raise SystemExit("the CPU step gives numbers that are not finite")
    return tuple(logits.shape)


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        check()
    else:
        sys.exit(main(Path(sys.argv[1])))
