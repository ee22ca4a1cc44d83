"""Registration: repeatable, complete, and strict about what torch_npu brings."""

import subprocess
import sys

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


def test_a_torch_npu_without_an_operator_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match="npu_lightning_indexer"):
        registry.check_provided(SCHEMAS, lambda name: name != "npu_lightning_indexer")
