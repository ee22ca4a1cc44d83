"""Writes ``services/worker/ops/schemas.py`` from a torch_npu wheel, without importing it.

The wheel's operator library holds the text of every schema it registers. Run:

    pip download torch_npu==2.13.0 --no-deps -d DIR
    python tools/npu_schemas.py DIR/torch_npu-2.13.0-*.whl > services/worker/ops/schemas.py
"""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

LIBRARY = "torch_npu/lib/libtorch_npu.so"
OPERATORS = (
    "npu_add_rms_norm",
    "npu_dequant_swiglu_quant",
    "npu_dynamic_block_quant",
    "npu_dynamic_quant",
    "npu_format_cast",
    "npu_grouped_matmul",
    "npu_grouped_matmul_swiglu_quant_v2",
    "npu_interleave_rope",
    "npu_kv_quant_sparse_flash_attention",
    "npu_kv_rmsnorm_rope_cache_v2",
    "npu_lightning_indexer",
    "npu_moe_distribute_combine_v2",
    "npu_moe_distribute_dispatch_v2",
    "npu_moe_gating_top_k",
    "npu_moe_init_routing_v2",
    "npu_moe_token_unpermute",
    "npu_quant_lightning_indexer",
    "npu_quant_matmul",
    "npu_quantize",
    "npu_rms_norm",
    "npu_scatter_nd_update_",
    "npu_sparse_flash_attention",
    "npu_swiglu",
    "npu_transpose_batchmatmul",
)
_LINE = 84  # text columns inside the indented quotes
_HEADER = '''"""Schemas of the ``torch.ops.npu`` operators in use, of torch_npu {version}.

Written by ``tools/npu_schemas.py`` from the wheel; do not edit by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

TORCH_NPU_VERSION = "{version}"

SCHEMAS: Mapping[str, str] = MappingProxyType(
    {{
{entries}    }}
)
'''


def find_schemas(wheel: Path) -> dict[str, str]:
    """Schema text of every operator in ``OPERATORS``; a missing or ambiguous one is an error."""
    with zipfile.ZipFile(wheel) as archive:
        library = archive.read(LIBRARY)
    schemas = {}
    for name in OPERATORS:
        # A literal start lets the search skip through the hundred megabytes.
        pattern = rb"\0(" + name.encode() + rb"\([^\0]*\) -> [^\0]*)(?=\0)"
        found = {match.decode() for match in re.findall(pattern, library)}
        if len(found) != 1:
            raise SystemExit(f"{name}: expected one schema in {wheel.name}, found {sorted(found)}")
        schemas[name] = found.pop()
    return schemas


def render(version: str, schemas: dict[str, str]) -> str:
    """The text of schemas.py."""
    entries = "".join(_entry(name, schema) for name, schema in sorted(schemas.items()))
    return _HEADER.format(version=version, entries=entries)


def _entry(name: str, schema: str) -> str:
    lines: list[str] = [""]
    for piece in re.findall(r"[^ ]+ ?", schema):
        if len(lines[-1]) + len(piece) > _LINE:
            lines.append("")
        lines[-1] += piece
    body = "".join(f"            {_quoted(line)}\n" for line in lines)
    return f'        "{name}": (\n{body}        ),\n'


def _quoted(line: str) -> str:
    quote = "'" if '"' in line else '"'
    return f"{quote}{line}{quote}" if quote not in line else repr(line)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    sys.stdout.write(render(path.name.split("-")[1], find_schemas(path)))
