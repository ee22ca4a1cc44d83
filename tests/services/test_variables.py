"""Variables of one process in the environment of all of them."""

from itertools import product

import pytest

from services.detokenizer.settings import DetokenizerSettings
from services.frontend.settings import FrontendSettings
from services.launcher.settings import UpSettings
from services.scheduler.settings import SchedulerSettings
from services.worker.settings import WorkerSettings
from shared.config import ProcessSettings, unread_variables
from shared.parent import PARENT_VARIABLE

PROCESSES = (
    UpSettings,
    FrontendSettings,
    DetokenizerSettings,
    SchedulerSettings,
    WorkerSettings,
)


@pytest.mark.parametrize(("reader", "other"), [*product(PROCESSES, PROCESSES)])
def test_what_one_process_reads_is_no_mistake_to_another(
    reader: type[ProcessSettings], other: type[ProcessSettings]
) -> None:
    names = [name.upper() for name in reader.model_fields]
    variables = [f"GLM_MESH_{name}" for name in names]
    variables += [f"GLM_MESH_{reader.service.upper()}_{name}" for name in names]
    environment = dict.fromkeys([*variables, PARENT_VARIABLE], "1")
    assert not list(unread_variables(other, environment))
