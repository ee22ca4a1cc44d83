"""Whether a worker's steps are captured, and how."""


from services.worker.graphs.recorded_model import RecordedModel, StatesForm
from services.worker.graphs.recording import CaptureError
from services.worker.kv_cache import KVCaches
from services.worker.model.decoder import Decoder
from services.worker.ops import native
from services.worker.plan import Capacity
from shared.log import get_logger

_log = get_logger(__name__)

StepModel = Decoder | RecordedModel[KVCaches]
"""What runs steps: the model itself, or its records."""


def capture_steps(
    decoder: Decoder, caches: KVCaches, limits: Capacity, *, row_multiple: int
) -> StepModel:
    """The model with its steps captured, where that is possible.

    Args:
        decoder: The model; it has run once.
        caches: Its caches.
        limits: Bounds of a step.
        row_multiple: Steps are padded to a multiple of it.
    """
    library = native.load()
    if library is None:
        return decoder  # told at the registration of kernels
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
