"""Settings of a scheduler process; flag names are vLLM's where vLLM has the flag."""

from typing import ClassVar, Literal

from pydantic import Field

from services.scheduler.engine import EngineConfig
from services.scheduler.limits import CoreConfig
from services.scheduler.outbox import OutboxLimits
from shared.config import Address, ServiceSettings


class SchedulerSettings(ServiceSettings):
    """What the scheduler is told; limits without a value are the worker's own."""

    service: ClassVar[str] = "scheduler"

    worker_address: Address = Field(description="gRPC address of the worker group's leader.")
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
    max_plans_in_flight: int = Field(
        default=1, ge=1, le=2, description="2 plans one step ahead of the worker's results."
    )
    scheduling_policy: Literal["fcfs"] = Field(
        default="fcfs", description="Order in which waiting sequences are admitted."
    )
    max_timeout_s: float = Field(
        default=3600.0, gt=0, description="Time limit of requests that name none or a longer one."
    )
    step_timeout_s: float = Field(
        default=60.0, gt=0, description="A step without result for so long ends the epoch."
    )
    worker_grace_s: float = Field(
        default=1.2, ge=0, description="Sequences wait so long for a lost worker, then fail."
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

    @property
    def core_config(self) -> CoreConfig:
        """Settings of the decisions."""
        return CoreConfig(
            max_num_seqs=self.max_num_seqs or 0,
            max_num_batched_tokens=self.max_num_batched_tokens or 0,
            max_model_len=self.max_model_len or 0,
            max_queued_requests=self.max_queued_requests,
            max_queued_tokens=self.max_queued_tokens,
            max_plans_in_flight=self.max_plans_in_flight,
            max_timeout_s=self.max_timeout_s,
            policy=self.scheduling_policy,
        )

    @property
    def engine_config(self) -> EngineConfig:
        """Settings of the loop."""
        return EngineConfig(
            max_plans_in_flight=self.max_plans_in_flight,
            step_timeout_s=self.step_timeout_s,
            worker_grace_s=self.worker_grace_s,
        )

    @property
    def outbox_limits(self) -> OutboxLimits:
        """How slow a client may be."""
        return OutboxLimits(max_bytes=self.reader_max_bytes, stall_s=self.reader_stall_timeout_s)
