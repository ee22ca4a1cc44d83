"""GLM-5.2 and the deployments of its published guide."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.worker.model.cache_format import CacheFormat
from services.worker.model.config import ModelConfig
from services.worker.parallel.topology import Topology
from services.worker.sizing.deployment import Deployment
from services.worker.sizing.hardware import HARDWARE, HardwareName
from services.worker.sizing.recipe import SchemeName, describe

MODELS = Path(__file__).resolve().parents[4] / "models"

MakeDeployment = Callable[..., Deployment]


@pytest.fixture(scope="session")
def glm() -> ModelConfig:
    return ModelConfig.from_dir(MODELS / "glm-5.2")


@pytest.fixture(scope="session")
def nano() -> ModelConfig:
    return ModelConfig.from_dir(MODELS / "glm-nano")


@pytest.fixture(scope="session")
def make_deployment(glm: ModelConfig) -> MakeDeployment:
    """A deployment of GLM-5.2; `sfa` and `li` are its caches in eight bits."""

    def make(
        topology: str,
        scheme: SchemeName = "w8a8c8",
        hardware: HardwareName = "a3",
        *,
        sfa: bool = False,
        li: bool = False,
        **fields: Any,
    ) -> Deployment:
        fields.setdefault("max_model_len", 131072)
        fields.setdefault("config", glm)
        return Deployment(
            scheme=scheme,
            quantization=describe(fields["config"], scheme),
            topology=Topology.parse(topology),
            hardware=HARDWARE[hardware],
            cache=CacheFormat(sparse_sfa_c8=sfa, sparse_li_c8=li),
            **fields,
        )

    return make
