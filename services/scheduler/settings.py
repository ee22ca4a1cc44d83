"""Settings of a scheduler process; flag names are vLLM's where vLLM has the flag."""

from typing import Annotated, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from services.scheduler.epochs import EngineConfig
from services.scheduler.limits import CoreConfig
from services.scheduler.outbox import OutboxLimits
from shared.config import Address, ServiceSettings

# Clients hear of a lost worker within two seconds.
ALONE_GRACE_S: Final = 1.2
# A rank that is lost costs all ranks their processes, so the weights are read anew whatever went
# wrong: a hiccup of one must not cost every running request.
GROUP_GRACE_S: Final = 120.0


def _as_list(value: object) -> object:
    """A single address stands for a list of one, in files and in code."""
    return [value] if isinstance(value, str) else value


class SchedulerSettings(ServiceSettings):
    """What the scheduler is told; limits without a value are the worker's own."""

    service: ClassVar[str] = "scheduler"

    worker_address: Annotated[list[Address], BeforeValidator(_as_list)] = Field(
        min_length=1,
        description="gRPC address of a worker group's leader; once for each replica, in order.",
    )
    enable_expert_parallel: bool = Field(
        default=False, description="The replicas share experts: they step together, or none does."
    )
    max_num_seqs: int | None = Field(default=None, ge=1, description="Most sequences in a step.")
    max_num_batched_tokens: int | None = Field(
        default=None, ge=1, description="Most tokens in a step; a longer prompt takes several."
    )
    max_model_len: int | None = Field(
        default=None, ge=2, description="Longest prompt plus output, in tokens."
    )
    max_queued_requests: int = Field(
        default=4096, ge=1, description="Sequences that may wait; more are refused (QUEUE_FULL)."
    )
    max_queued_tokens: int = Field(
        default=16 << 20, ge=1, description="Tokens of waiting sequences; more are refused."
    )
    async_scheduling: bool = Field(
        default=False, description="Plan a step while one runs, as max_plans_in_flight 2 does."
    )
    max_plans_in_flight: int | None = Field(
        default=None, ge=1, le=2, description="2 plans one step ahead of the worker's results; 1."
    )
    scheduling_policy: Literal["fcfs", "priority"] = Field(
        default="fcfs",
        description="Who is next: who came first, or whose priority is smaller.",
    )
    enable_prefix_caching: bool = Field(
        default=True, description="Sequences that begin alike share their KV blocks."
    )
    priority_ageing_s: float = Field(
        default=30.0, ge=0, description="Waiting so long makes up for one priority; 0: never."
    )
    enable_fair_share: bool = Field(
        default=True, description="Tenants (API keys) that wait are served in turn, by tokens."
    )
    watermark: float = Field(
        default=0.0, ge=0, lt=1, description="Share of KV blocks that admission leaves free."
    )
    long_prefill_token_threshold: int | None = Field(
        default=None,
        ge=0,
        description="A prompt with more tokens to go is long: it gets so many of a step that "
        "others need; an eighth of the step, 0: no prompt is long.",
    )
    max_num_partial_prefills: int = Field(
        default=4, ge=1, description="Prompts that may be under way at once."
    )
    max_long_partial_prefills: int = Field(default=3, ge=1, description="Long prompts among them.")
    prefill_schedule_interval: int = Field(
        default=2,
        ge=1,
        description="Replicas that step together take prompts in every so many-th step, and the "
        "others are captured decode steps.",
    )
    max_timeout_s: float = Field(
        default=3600.0, gt=0, description="Time limit of requests that name none or a longer one."
    )
    step_timeout_s: float = Field(
        default=60.0, gt=0, description="A step without result for so long ends the epoch."
    )
    num_ranks: int = Field(
        default=1, ge=1, description="Worker processes that end and start again together."
    )
    worker_grace_s: float | None = Field(
        default=None,
        ge=0,
        description="Sequences wait so long for a lost worker, then fail; default: "
        f"{ALONE_GRACE_S:g}, or {GROUP_GRACE_S:g} where it has several ranks.",
    )
    reader_stall_timeout_s: float = Field(
        default=2.0, gt=0, description="A client that takes nothing for so long is cut off."
    )
    reader_max_bytes: int = Field(
        default=16 << 20, ge=1 << 16, description="Unread bytes at which a client is cut off."
    )
    drain_timeout_s: float = Field(
        default=10.0, ge=0, description="For running requests to end after SIGTERM."
    )

    @field_validator("worker_address")
    @classmethod
    def _check_workers(cls, addresses: list[str]) -> list[str]:
        twice = next((address for address in addresses if addresses.count(address) > 1), None)
        if twice is not None:
            raise ValueError(f"{twice} is there twice, each replica has its own")
        return addresses

    @model_validator(mode="after")
    def _check_policies(self) -> "SchedulerSettings":
        if self.max_long_partial_prefills > self.max_num_partial_prefills:
            raise ValueError(
                f"--max-long-partial-prefills {self.max_long_partial_prefills} is more than "
                f"--max-num-partial-prefills {self.max_num_partial_prefills}"
            )
        if self.max_plans_in_flight == 1 and self.async_scheduling:
            raise ValueError("--max-plans-in-flight 1 is not --async-scheduling")
        return self

    @property
    def num_plans_in_flight(self) -> int:
        """Plans that a worker may have at once."""
        return self.max_plans_in_flight or (2 if self.async_scheduling else 1)

    @property
    def core_config(self) -> CoreConfig:
        """Settings of the decisions."""
        return CoreConfig(
            max_num_seqs=self.max_num_seqs or 0,
            max_num_batched_tokens=self.max_num_batched_tokens or 0,
            max_model_len=self.max_model_len or 0,
            max_queued_requests=self.max_queued_requests,
            max_queued_tokens=self.max_queued_tokens,
            max_plans_in_flight=self.num_plans_in_flight,
            max_timeout_s=self.max_timeout_s,
            policy=self.scheduling_policy,
            enable_prefix_caching=self.enable_prefix_caching,
            priority_ageing_s=self.priority_ageing_s,
            enable_fair_share=self.enable_fair_share,
            watermark=self.watermark,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            prefill_schedule_interval=self.prefill_schedule_interval,
            max_num_partial_prefills=self.max_num_partial_prefills,
            max_long_partial_prefills=self.max_long_partial_prefills,
        )

    @property
    def engine_config(self) -> EngineConfig:
        """Settings of the loop."""
        return EngineConfig(
            max_plans_in_flight=self.num_plans_in_flight,
            step_timeout_s=self.step_timeout_s,
            worker_grace_s=self._grace_s,
        )

    @property
    def _grace_s(self) -> float:
        if self.worker_grace_s is not None:
            return self.worker_grace_s
        return ALONE_GRACE_S if self.num_ranks == 1 else GROUP_GRACE_S

    @property
    def outbox_limits(self) -> OutboxLimits:
        """How slow a client may be."""
        return OutboxLimits(max_bytes=self.reader_max_bytes, stall_s=self.reader_stall_timeout_s)
