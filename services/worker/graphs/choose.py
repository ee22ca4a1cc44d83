"""Whether a worker's steps are captured, and how."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from services.worker.graphs.capture import DeviceCapturer, HostCapturer
from services.worker.graphs.captured_model import CapturedModel
from services.worker.graphs.recorded_model import RecordedModel, StatesForm
from services.worker.graphs.recording import CaptureError
from services.worker.graphs.sizes import CaptureSizes, choose_sizes
from services.worker.kv_cache import KVCaches
from services.worker.model.decoder import Decoder
from services.worker.ops import native
from services.worker.parallel.moe_method import MoeMethod
from services.worker.plan import Capacity
from services.worker.settings import WorkerSettings
from shared.log import get_logger

_log = get_logger(__name__)

# All-to-all tells the host how many rows come from where. The fused operators are one each on a
# device; here they are made of exchanges that do the same.
_DEVICE_METHODS = frozenset({None, MoeMethod.ALLGATHER, MoeMethod.MC2})
_HOST_METHODS = frozenset({None, MoeMethod.ALLGATHER})

StepModel = Decoder | RecordedModel[KVCaches] | CapturedModel[KVCaches]
"""What runs steps: the model itself, or what was captured of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """A model, and the sizes that its steps are to have."""

    model: StepModel
    sizes: CaptureSizes | None = None
    """None: steps are what they are."""

    @property
    def partial(self) -> Decoder | RecordedModel[KVCaches] | None:
        """The model where its last layer may be asked for some tokens alone."""
        model = self.model
        decoder = model.model if isinstance(model, RecordedModel) else model
        can = isinstance(decoder, Decoder) and _is_whole(decoder) and decoder.mtp is None
        return model if can and not isinstance(model, CapturedModel) else None


def capture_steps(
    settings: WorkerSettings,
    decoder: Decoder,
    caches: KVCaches,
    limits: Capacity,
    *,
    row_multiple: int,
    method_of: Callable[[int], MoeMethod | None] = lambda num_tokens: None,
) -> Capture:
    """The model with its steps captured, as far as asked for and possible.

    On a CPU a step of any size can be; sizes are used there only when they are asked for.

    Args:
        settings: Of the worker.
        decoder: The model; it has run once.
        caches: Its caches.
        limits: Bounds of a step.
        row_multiple: Steps are padded to a multiple of it.
        method_of: How the tokens of a step of so many reach experts on other ranks; None: all are
            here.

    Raises:
        ConfigError: No size is left of those asked for.
    """
    library = native.load()
    is_host = decoder.device.type == "cpu"
    if not settings.captures_steps or (is_host and library is None):
        return Capture(model=decoder)
    asked, largest = settings.cudagraph_capture_sizes, settings.max_cudagraph_capture_size
    is_any_size = asked is None and largest is None and _is_whole(decoder)
    if library is not None and is_host and is_any_size:
        return Capture(model=_record(decoder, caches, limits, library, row_multiple))
    multiple = decoder.spec.placement.token_multiple
    sizes = choose_sizes(limits, asked=asked, largest=largest, multiple=multiple)
    if sizes is None:
        _log.warning("steps are not captured: none is of a multiple of %d tokens", multiple)
        return Capture(model=decoder)
    capturable = _HOST_METHODS if is_host else _DEVICE_METHODS
    kept = tuple(size for size in sizes.sizes if method_of(size) in capturable)
    if not kept:
        _log.warning("steps are not captured: what experts on other ranks get is told in each step")
        return Capture(model=decoder)
    capturer = HostCapturer(library) if library is not None and is_host else DeviceCapturer()
    return Capture(model=CapturedModel(decoder, caches, capturer), sizes=replace(sizes, sizes=kept))


def _is_whole(decoder: Decoder) -> bool:
    """Whether no other rank has a part: what ranks exchange lies apart by the size of the step."""
    placement = decoder.spec.placement
    stages = placement.is_first_stage(), placement.is_last_stage(decoder.config)
    return placement.tp_size == 1 and placement.ep_size == 1 and all(stages)


def _record(
    decoder: Decoder,
    caches: KVCaches,
    limits: Capacity,
    library: native.Native,
    row_multiple: int,
) -> StepModel:
    form = StatesForm(
        width=decoder.config.hidden_size,
        dtype=decoder.dtype,
        has_drafts=decoder.mtp is not None,
    )
    try:
        return RecordedModel(decoder, caches, limits, form, library, row_multiple=row_multiple)
    except CaptureError as error:
        _log.warning("steps are not captured, each operator is called from Python: %s", error)
        return decoder
