"""The model relies on nothing that a device leaves open.

A device may return selected positions in any order, leave unused results unset, and refuse views.
The kernels of a child process do all of that; the logits stay those of the friendly kernels.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.model.cache_format import CacheFormat

CHILD = """
import sys
import torch
from services.worker.ops import registry

friendly = registry.cpu_kernels
generator = torch.Generator().manual_seed(1)

def shuffled(select):
    def call(*arguments, **options):
        result = select(*arguments, **options)
        positions = result if isinstance(result, torch.Tensor) else result[0]
        for row in positions[:, 0]:
            count = int((row >= 0).sum())
            row[:count] = row[torch.randperm(count, generator=generator)]
        return result
    return call

def strict(kernel):
    def call(*arguments, **options):
        for value in (*arguments, *options.values()):
            if isinstance(value, torch.Tensor) and value.dim() == 3:
                assert value.is_contiguous(), tuple(value.shape)
        return kernel(*arguments, **options)
    return call

def unset(kernel):
    def call(*arguments, **options):
        weights, experts, unused = kernel(*arguments, **options)
        return weights, experts, unused.fill_(float("nan"))
    return call

def hostile(library):
    kernels = friendly(library)
    for name in ("npu_lightning_indexer", "npu_quant_lightning_indexer"):
        kernels[name] = strict(shuffled(kernels[name]))
    for name in ("npu_sparse_flash_attention", "npu_kv_quant_sparse_flash_attention"):
        kernels[name] = strict(kernels[name])
    kernels["npu_moe_gating_top_k"] = unset(kernels["npu_moe_gating_top_k"])
    return kernels

registry.cpu_kernels = hostile
registry.register()
from tests_driver import Driver
import torch
from services.worker.model.cache_format import CacheFormat
from services.worker.model.config import ModelConfig
from services.worker.model.spec import ModelSpec
from services.worker.loading.load import load_model

path, tokens, target = sys.argv[1], [int(t) for t in sys.argv[2].split(",")], sys.argv[3]
config = ModelConfig.from_dir(path)
c8 = sys.argv[4] == "c8"
cache = CacheFormat(sparse_sfa_c8=c8, sparse_li_c8=c8)
spec = ModelSpec(config=config, dtype=torch.float32, device=torch.device("cpu"), cache=cache)
decoder = load_model(path, spec)
torch.save(Driver(decoder, 1, 256).run(tokens, [90, 91]), target)
"""


@pytest.mark.parametrize(("caches", "bound"), [("plain", 1e-4), ("c8", 1e-2)])
def test_logits_do_not_depend_on_what_a_device_leaves_open(
    caches: str,
    bound: float,
    make_checkpoint: Callable[..., Any],
    make_driver: Callable[..., Any],
    random_tokens: Callable[..., list[int]],
    tmp_path: Path,
) -> None:
    checkpoint = make_checkpoint()
    tokens = random_tokens(120)
    cache = CacheFormat(sparse_sfa_c8=caches == "c8", sparse_li_c8=caches == "c8")
    friendly = make_driver(checkpoint, max_len=256, cache=cache).run(tokens, [90, 91])
    driver = Path(__file__).with_name("conftest.py")
    (tmp_path / "tests_driver.py").write_text(driver.read_text())
    (tmp_path / "child.py").write_text(CHILD)
    target = tmp_path / "logits.pt"
    subprocess.run(
        [
            sys.executable,
            str(tmp_path / "child.py"),
            str(checkpoint.path),
            ",".join(str(token) for token in tokens),
            str(target),
            caches,
        ],
        env={"PYTHONPATH": str(Path(__file__).parents[4]), "OMP_NUM_THREADS": "1"},
        check=True,
    )
    # Another order of the same positions: another order of float32 sums, nothing more. Eight bits
    # make a last bit before a rounding a step of 1/127 of a lane after it.
    torch.testing.assert_close(torch.load(target), friendly, atol=bound, rtol=0)
