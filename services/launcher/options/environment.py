"""The environment variables that vLLM's Ascend deployments set, and what is wrong with them."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, ValidationError

from services.launcher.options.fields import Index, Options, Size, Whole, mistakes


def _alloc_conf(value: object) -> object:
    """The keys of `a:1,b:2` that matter here."""
    if not isinstance(value, str):
        return value
    pairs = [pair.partition(":") for pair in value.split(",")]
    return {
        key.strip(): content.strip()
        for key, _, content in pairs
        if key.strip() in AllocConf.model_fields
    }


def _partition(value: object) -> object:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


class AllocConf(Options):
    """The keys of `PYTORCH_NPU_ALLOC_CONF` that exclude each other."""

    expandable_segments: bool | None = None
    max_split_size_mb: str | None = None
    garbage_collection_threshold: str | None = None


Flag01 = Annotated[Whole, Field(ge=0, le=1)]


class Environment(Options):
    """Variables by their own names; None: not set."""

    HCCL_BUFFSIZE: Size | None = Field(
        default=None, description="MB of one exchange buffer of a communicator."
    )
    HCCL_OP_EXPANSION_MODE: Literal["AI_CPU", "AIV", "HOST", "HOST_TS"] | None = Field(
        default=None, description="Where collectives are driven from."
    )
    HCCL_IF_IP: str | None = Field(default=None, description="Address for building links.")
    HCCL_SOCKET_IFNAME: str | None = Field(default=None, description="Interface for it.")
    GLOO_SOCKET_IFNAME: str | None = Field(default=None, description="Interface of gloo.")
    HCCL_INTRA_ROCE_ENABLE: Flag01 | None = Field(
        default=None, description="RoCE between the NPUs of a node."
    )
    HCCL_INTRA_PCIE_ENABLE: Flag01 | None = Field(
        default=None, description="PCIe between the NPUs of a node."
    )
    HCCL_CONNECT_TIMEOUT: Annotated[Whole, Field(ge=120, le=7200)] | None = Field(
        default=None, description="For peers to answer, seconds."
    )
    HCCL_EXEC_TIMEOUT: Size | None = Field(
        default=None, description="For a collective to end, seconds; 1836 if not set."
    )
    PYTORCH_NPU_ALLOC_CONF: Annotated[AllocConf, BeforeValidator(_alloc_conf)] | None = Field(
        default=None, description="The allocator of torch_npu, which reads it itself."
    )
    ASCEND_RT_VISIBLE_DEVICES: str | None = Field(
        default=None, description="Devices to use; CANN reads it itself."
    )
    ASCEND_LAUNCH_BLOCKING: Flag01 | None = Field(
        default=None, description="One operator at a time; torch_npu reads it itself."
    )
    VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS: Size | None = Field(
        default=None, description="For a step to end, seconds."
    )
    VLLM_SERVER_DEV_MODE: bool | None = Field(
        default=None, description="Serve POST /reset_prefix_cache."
    )
    VLLM_PP_LAYER_PARTITION: Annotated[list[Size], BeforeValidator(_partition)] | None = Field(
        default=None, description="Layers of each pipeline stage."
    )
    MOONCAKE_CONFIG_PATH: str | None = Field(default=None, description="File of the KV store.")
    MF_GROUP_JOIN_MAX_TIMEOUT: Index | None = Field(
        default=None, description="For a MemFabric group to form, seconds."
    )
    DYNAMIC_EPLB: bool | None = Field(default=None, description="Allows `dynamic_eplb`.")
    EXPERT_MAP_RECORD: bool | None = Field(default=None, description="Allows recording.")


# Older forms of keys of --additional-config; a key that is given wins.
LEGACY: Final = {
    "VLLM_ASCEND_BALANCE_SCHEDULING": "enable_balance_scheduling",
    "VLLM_ASCEND_ENABLE_MLAPO": "enable_mlapo",
    "VLLM_ASCEND_ENABLE_NZ": "weight_nz_mode",
    "VLLM_ASCEND_ENABLE_FUSED_MC2": "enable_fused_mc2",
    "VLLM_ASCEND_ENABLE_FLASHCOMM1": "enable_flashcomm1",
}


def read_environment(variables: Mapping[str, str]) -> tuple[Environment, list[str]]:
    """The variables that matter, and a line for each that has no sense."""
    found: dict[str, Any] = {
        name: variables[name] for name in Environment.model_fields if variables.get(name)
    }
    problems: list[str] = []
    while True:
        try:
            return Environment(**found), problems
        except ValidationError as error:
            for path, _, why in mistakes(Environment, error):
                name = str(path[0])
                if name in found:
                    problems.append(f"{name}={found.pop(name)}: {why}")


def legacy_keys(variables: Mapping[str, str]) -> dict[str, str]:
    """Keys of `--additional-config` that were given as variables: key -> variable."""
    return {key: variable for variable, key in LEGACY.items() if variables.get(variable)}
