import torch

from services.worker.loading.stored_types import STORED_TYPES


def test_sizes_are_those_of_torch() -> None:
    for name, stored in STORED_TYPES.items():
        element = torch.empty(1, dtype=stored.dtype)
        assert stored.num_bytes == element.element_size(), name
        assert stored.is_float == (element.is_floating_point() or element.is_complex()), name
