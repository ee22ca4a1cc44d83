"""Options that the services themselves honour, and how they are told."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from services.launcher.options.deployment import Deployment
from shared.config import flag_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """An option of vLLM that is a setting of a service of ours."""

    name: str
    service: str
    flag: str

    def words(self, asked: Deployment) -> tuple[str, ...]:
        """The words of the service's command line; none where the service's default is meant."""
        value = asked.value(self.name)
        if not asked.is_given(self.name) or value == "none":
            return ()
        if isinstance(value, bool):
            return (self.flag if value else "--no-" + self.flag.removeprefix("--"),)
        return (f"{self.flag}={value}",)


PASSED: Final = (
    Passed(
        name="safetensors_load_strategy",
        service="worker",
        flag="--safetensors-load-strategy",
    ),
    Passed(
        name="additional_config.enable_sparse_li_c8",
        service="worker",
        flag="--enable-sparse-li-c8",
    ),
    Passed(
        name="additional_config.enable_sparse_sfa_c8",
        service="worker",
        flag="--enable-sparse-sfa-c8",
    ),
    Passed(name="additional_config.weight_nz_mode", service="worker", flag="--weight-nz-mode"),
    Passed(
        name="speculative_config.num_speculative_tokens",
        service="worker",
        flag="--num-speculative-tokens",
    ),
    Passed(name="compilation_config.cudagraph_mode", service="worker", flag="--cudagraph-mode"),
    Passed(
        name="compilation_config.cudagraph_capture_sizes",
        service="worker",
        flag="--cudagraph-capture-sizes",
    ),
    Passed(
        name="compilation_config.max_cudagraph_capture_size",
        service="worker",
        flag="--max-cudagraph-capture-size",
    ),
    Passed(
        name="additional_config.multistream_overlap_shared_expert",
        service="worker",
        flag="--multistream-overlap-shared-expert",
    ),
    Passed(name="enforce_eager", service="worker", flag="--enforce-eager"),
    *(
        Passed(name=name, service="frontend", flag=flag_of(name))
        for name in (
            "seed",
            "sse_keep_alive_interval",
            "allowed_origins",
            "allowed_methods",
            "allowed_headers",
            "allow_credentials",
        )
    ),
    *(
        Passed(name=name, service="scheduler", flag=flag_of(name))
        for name in (
            "enable_prefix_caching",
            "async_scheduling",
            "scheduling_policy",
            "watermark",
            "long_prefill_token_threshold",
            "max_num_partial_prefills",
            "max_long_partial_prefills",
            "prefill_schedule_interval",
            "priority_ageing_s",
            "enable_fair_share",
        )
    ),
    Passed(name="environment.VLLM_SERVER_DEV_MODE", service="frontend", flag="--enable-dev-routes"),
    Passed(name="max_num_queued_reqs", service="scheduler", flag="--max-queued-requests"),
    Passed(name="max_num_queued_tokens", service="scheduler", flag="--max-queued-tokens"),
)

# They say which worker processes there are, and what each is told (ranks.py).
LAYOUT: Final = (
    "api_server_count",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "enable_expert_parallel",
    "environment.VLLM_PP_LAYER_PARTITION",
    "additional_config.enable_dsa_cp",
    "additional_config.enable_flashcomm1",
)

# Accepted values say what is so in any case; the others are in the tables.
AS_IT_IS: Final = (
    "quantization",
    "block_size",
    "prefix_caching_hash_algo",
    "kv_cache_dtype",
    "load_format",
    "node_rank",
    "data_parallel_size_local",
    "data_parallel_start_rank",
    "distributed_executor_backend",
    "compilation_config",
    "speculative_config",
)


def service_flags(asked: Deployment) -> Mapping[str, tuple[str, ...]]:
    """Further words of each service's command line."""
    flags: dict[str, tuple[str, ...]] = {}
    for passed in PASSED:
        if words := passed.words(asked):
            flags[passed.service] = flags.get(passed.service, ()) + words
    return flags
