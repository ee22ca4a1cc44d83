"""What all handlers of one gateway share; built once at start, never changed."""

from dataclasses import dataclass

from services.frontend.admission import Admission
from services.frontend.background import BackgroundWork
from services.frontend.detokenizers import Detokenizers
from services.frontend.errors import ApiError
from services.frontend.metrics import GatewayMetrics
from services.frontend.render import Renderer
from services.frontend.response_store import ResponseStore
from services.frontend.sampling import Seeds
from services.frontend.settings import FrontendSettings
from services.frontend.shared_quota import SharedCounts
from services.frontend.streams import StreamKeeper
from shared.glm.dialect import Dialect
from shared.sampling import SamplingSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """The parts of a gateway.

    `context_length` is the least of the checkpoint's and the setting's; the scheduler's own limit,
    once known, may be lower still. `started_s` is the Unix time of the start. `key_counts` are
    those that several processes keep together, where they do.
    """

    settings: FrontendSettings
    dialect: Dialect
    renderer: Renderer
    detokenizers: Detokenizers
    admission: Admission
    metrics: GatewayMetrics
    keeper: StreamKeeper
    responses: ResponseStore
    background: BackgroundWork
    defaults: SamplingSpec
    seeds: Seeds
    context_length: int
    started_s: int
    key_counts: SharedCounts | None = None

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, in tokens."""
        known = self.detokenizers.max_model_len
        return min(known, self.context_length) if known else self.context_length

    @property
    def model_name(self) -> str:
        """The name in answers."""
        return self.settings.model_names[0]

    @property
    def not_ready_reason(self) -> str:
        """Why the chain behind the gateway cannot serve; empty when it can."""
        if self.admission.is_draining:
            return "draining"
        if self.detokenizers.num_ready:
            return ""
        if not self.detokenizers.is_connected:
            return "no detokenizer is connected"
        if self.detokenizers.is_draining:
            return "every detokenizer is draining"
        return "the worker is not ready, or the scheduler is away"

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served here."""
        if name is not None and name not in self.settings.model_names:
            raise model_not_found(name)


def model_not_found(name: str) -> ApiError:
    """A 404 for a model."""
    return ApiError(
        404, f"The model '{name[:200]}' does not exist.", param="model", code="model_not_found"
    )
