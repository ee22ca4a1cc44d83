"""Uses of torch_npu are found however it is reached, with what they are given."""

from pathlib import Path

import pytest

from tools.npu_contract.names import Use, Way, find_uses

SOURCE = """
import importlib
import torch

def run(device, graph):
    torch.accelerator.synchronize(device)
    with torch.npu.graph(graph, pool=3):
        pass
    torch.npu.current_stream().synchronize()
    library = importlib.import_module("torch_npu")
    library.npu.config.allow_internal_format = True
    other = importlib.import_module("other")
    other.npu.call()
    torch.ops.npu.npu_swiglu(device)
    return library.__version__
"""


@pytest.fixture
def uses(tmp_path: Path) -> list[Use]:
    path = tmp_path / "source.py"
    path.write_text(SOURCE)
    return find_uses([path, path])


def test_every_use_is_found_once_with_its_arguments(uses: list[Use]) -> None:
    assert uses == [
        Use("torch.accelerator.synchronize", Way.CALLED, 1),
        Use("torch.npu.current_stream().synchronize", Way.CALLED),
        Use("torch.npu.graph", Way.CALLED, 1, ("pool",)),
        Use("torch_npu.__version__", Way.READ),
        Use("torch_npu.npu.config.allow_internal_format", Way.SET),
    ]
