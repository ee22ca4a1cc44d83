"""Settings of a detokenizer process."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from services.detokenizer.delivery import ReaderLimits
from shared.config import Address, ServiceSettings


class DetokenizerSettings(ServiceSettings):
    """What the detokenizer is told."""

    service: ClassVar[str] = "detokenizer"

    scheduler_address: Address = Field(description="gRPC address of the scheduler.")
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

    @property
    def reader_limits(self) -> ReaderLimits:
        """How slow a reader may be."""
        return ReaderLimits(
            max_pending_bytes=self.reader_max_pending_bytes, max_stall_s=self.reader_stall_timeout_s
        )
