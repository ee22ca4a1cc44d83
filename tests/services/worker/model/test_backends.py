"""The choice of attention by what a model's attention is made of."""

from typing import Any

import pytest

from services.worker.model.attention import SparseLatentAttention
from services.worker.model.backends import BackendKey, attention_backend, backend_for
from services.worker.model.config import ModelConfig
from shared.errors import ConfigError


def test_the_sparse_latent_backend_serves_this_family(tiny_values: dict[str, Any]) -> None:
    assert attention_backend(ModelConfig.from_dict(tiny_values)) is SparseLatentAttention


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (BackendKey(True, False, False), "dense latent attention"),
        (BackendKey(False, False, False), "grouped-query attention"),
        (BackendKey(True, False, True), "compressed sparse attention"),
        (BackendKey(False, True, True), "of this kind"),
    ],
)
def test_backends_that_are_not_built_refuse_by_name(key: BackendKey, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        backend_for(key)
