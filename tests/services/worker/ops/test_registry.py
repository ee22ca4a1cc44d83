"""Registration: repeatable, complete, and strict about what torch_npu brings."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from services.worker.ops import meta, registry
from services.worker.ops.schemas import SCHEMAS
from shared.errors import ConfigError


def test_registering_twice_changes_nothing() -> None:
    registry.register()
    registry.register()
    for name in SCHEMAS:
        assert registry.has_operator(name)


def test_every_operator_has_a_cpu_and_a_meta_kernel() -> None:
    assert registry.cpu_kernels(None).keys() == meta.kernels().keys() == SCHEMAS.keys()


def test_the_dispatcher_holds_the_pinned_schemas() -> None:
    for name, schema in SCHEMAS.items():
        registered = getattr(torch.ops.npu, name).default._schema
        assert registered == torch._C.parse_schema(f"npu::{schema}")


def test_importing_registers_nothing() -> None:
    code = (
        "import services.worker.ops, services.worker.model.decoder, torch;"
        "assert not torch._C._jit_get_schemas_for_operator('npu::npu_rms_norm')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_compiled_kernels_the_torch_versions_serve_and_say_so(tmp_path: Path) -> None:
    code = f"""
import logging, pathlib, torch
from services.worker.ops import native, registry, variants
native.library_path = lambda variant: pathlib.Path({str(tmp_path)!r}) / variant.name
logging.basicConfig()
registry.register()
registry.register()
print(torch.ops.npu.npu_swiglu(torch.tensor([[0.0, 3.0]])).item())
print(torch.ops.glm.linear(torch.ones(1, 2), torch.ones(2, 1)).item())
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["0.0", "2.0"]
    assert result.stderr.count("no compiled CPU kernels") == 1


def test_a_torch_npu_without_an_operator_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match="npu_lightning_indexer"):
        registry.check_provided(SCHEMAS, lambda name: name != "npu_lightning_indexer")
