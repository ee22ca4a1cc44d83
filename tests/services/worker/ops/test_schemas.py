"""The pinned schemas: parseable, named by their key, and complete for the model's calls."""

import re
from pathlib import Path

import pytest
import torch

from services.worker.ops.schemas import SCHEMAS

MODEL = Path(__file__).parents[4] / "services" / "worker" / "model"


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_parses_under_its_name(name: str) -> None:
    assert torch._C.parse_schema(f"npu::{SCHEMAS[name]}").name == f"npu::{name}"


def test_the_model_calls_only_pinned_operators() -> None:
    text = "".join(path.read_text() for path in MODEL.glob("*.py"))
    assert set(re.findall(r"torch\.ops\.npu\.(\w+)", text)) == SCHEMAS.keys()


def test_in_place_writes_are_declared() -> None:
    """A compiler drops a call whose writes are not declared and whose results are unused."""
    for name in ("npu_kv_rmsnorm_rope_cache_v2", "npu_scatter_nd_update_"):
        schema = torch._C.parse_schema(f"npu::{SCHEMAS[name]}")
        assert any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
