"""Settings of a detokenizer process."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from services.detokenizer.delivery import ReaderLimits
from services.detokenizer.placement import PlacementRules
from services.detokenizer.schedulers import ResumeLimits
from shared.config import Addresses, ServiceSettings


class DetokenizerSettings(ServiceSettings):
    """What the detokenizer is told."""

    service: ClassVar[str] = "detokenizer"

    scheduler_address: Addresses = Field(
        description="gRPC addresses of the schedulers, a,b or repeated; alike at every detokenizer."
    )
    model: Path = Field(description="Checkpoint folder; its tokenizer.json is read.")
    max_timeout_s: float = Field(
        default=3600.0, gt=0, description="Time limit of requests that name none or a longer one."
    )
    reader_max_pending_bytes: int = Field(
        default=1 << 18,
        ge=1 << 12,
        description="Output kept for a stream without credit; past it the request ends.",
    )
    reader_stall_timeout_s: float = Field(
        default=30.0, gt=0, description="A stream without credit for so long ends."
    )
    peer_stall_timeout_s: float = Field(
        default=5.0, gt=0, description="A peer that reads nothing at all for so long is cut off."
    )
    drain_timeout_s: float = Field(
        default=10.0, ge=0, description="For running requests to end after SIGTERM."
    )
    placement_blocks: int = Field(
        default=4,
        ge=1,
        description="Blocks at the start of prompts: those that share them go to one scheduler.",
    )
    placement_skew: float = Field(
        default=1.25,
        ge=1,
        description="One with so many times the mean load is passed over all the same.",
    )
    resume_timeout_s: float = Field(
        default=30.0,
        ge=0,
        description="Sequences of a lost scheduler wait so long for one to go on at; 0: they fail.",
    )
    max_resumptions: int = Field(
        default=3, ge=0, description="Losses of one request that are made good."
    )
    silence_timeout_s: float = Field(
        default=5.0, ge=1.5, description="A scheduler that says nothing for so long is lost."
    )

    @property
    def placement_rules(self) -> PlacementRules:
        """How a scheduler is chosen."""
        return PlacementRules(num_blocks=self.placement_blocks, skew=self.placement_skew)

    @property
    def resume_limits(self) -> ResumeLimits:
        """How much is done about lost schedulers."""
        return ResumeLimits(
            wait_s=self.resume_timeout_s,
            max_losses=self.max_resumptions,
            silence_s=self.silence_timeout_s,
        )

    @property
    def reader_limits(self) -> ReaderLimits:
        """How slow a reader may be."""
        return ReaderLimits(
            max_pending_bytes=self.reader_max_pending_bytes, max_stall_s=self.reader_stall_timeout_s
        )
