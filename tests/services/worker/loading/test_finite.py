"""Raw bytes are judged as torch judges the values."""

import numpy as np
import pytest
import torch

from services.worker.loading.finite import find_fault
from services.worker.loading.stored_types import STORED_TYPES

FLOATS = sorted(name for name, stored in STORED_TYPES.items() if stored.is_float)
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.mark.parametrize("name", ["BF16", "F16", "F8_E4M3", "F8_E5M2", "F8_E8M0"])
def test_every_bit_pattern_is_judged_as_torch_judges_it(name: str) -> None:
    stored = STORED_TYPES[name]
    size = stored.num_bytes
    patterns = torch.arange(1 << (8 * size), dtype=torch.int32).to(WORDS[size])
    expected = torch.isfinite(patterns.view(stored.dtype).double()).tolist()
    data = patterns.view(torch.uint8).numpy()
    judged = [find_fault(data[at : at + size], name) is None for at in range(0, data.size, size)]
    assert judged == expected


@pytest.mark.parametrize("name", ["F32", "F64", "C64"])
@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_found(name: str, value: float) -> None:
    for place in (0, 1, 70_000, 199_999):  # in the first piece, in others, at the very end
        tensor = torch.zeros(200_000, dtype=STORED_TYPES[name].dtype)
        tensor[place] = value
        assert find_fault(tensor.view(torch.uint8).numpy(), name) == "holds NaN or infinity"


@pytest.mark.parametrize("name", ["F32", "F64", "C64"])
def test_the_largest_numbers_and_the_least_are_taken(name: str) -> None:
    dtype = STORED_TYPES[name].dtype
    info = torch.finfo(dtype)
    values = [info.max, info.min, info.tiny, -0.0, info.tiny / 2]
    tensor = torch.tensor(values, dtype=torch.float64).to(dtype)
    assert find_fault(tensor.view(torch.uint8).numpy(), name) is None


@pytest.mark.parametrize("name", sorted(STORED_TYPES.keys() - set(FLOATS) - {"BOOL"}))
def test_integers_are_never_wrong(name: str) -> None:
    assert find_fault(np.full(64, 0xFF, np.uint8), name) is None


def test_a_byte_that_is_no_truth_value_is_found() -> None:
    assert find_fault(np.array([0, 1, 1], np.uint8), "BOOL") is None
    fault = find_fault(np.array([0, 1, 2], np.uint8), "BOOL")
    assert fault == "holds bytes that are no truth value"


def test_nothing_is_no_fault() -> None:
    assert find_fault(np.empty(0, np.uint8), "BF16") is None
