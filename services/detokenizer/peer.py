"""One scheduler as this service knows it: connection, latest snapshot, what was sent since."""

from collections.abc import Callable

from services.detokenizer.credit import Credit
from services.detokenizer.placement import SchedulerWork
from services.detokenizer.scheduler_client import SchedulerClient
from shared.sampling import LoadSnapshot


class SchedulerPeer:
    """A scheduler that may be there or not.

    Args:
        address: Where it listens; also its name, which every detokenizer knows it by.
        on_state: Told true when it is reached, false when it is lost.
        on_load: Told every snapshot.
    """

    def __init__(
        self,
        address: str,
        *,
        on_state: Callable[[bool], None],
        on_load: Callable[[LoadSnapshot], None],
    ) -> None:
        """Not reached yet."""
        self.address = address
        self.client = SchedulerClient(address, on_state=self._take_state, on_load=self._take_load)
        self.credit = Credit()
        # None until it has told one since it was reached.
        self.load: LoadSnapshot | None = None
        # Whether it is one that is reached at another address, too: then it gets nothing here.
        self.is_twin = False
        self._on_state = on_state
        self._on_load = on_load

    @property
    def is_reached(self) -> bool:
        """Whether something can be sent."""
        return self.client.is_connected

    @property
    def is_open(self) -> bool:
        """Whether it may take a request: it is not known to drain."""
        is_draining = self.load is not None and self.load.is_draining
        return self.is_reached and not (is_draining or self.is_twin)

    @property
    def is_ready(self) -> bool:
        """Whether it makes steps and takes requests."""
        return self.is_open and self.load is not None and self.load.is_worker_ready

    def serves(self, model_digest: str) -> bool:
        """Whether it serves this model, as far as both are known."""
        own = self.load.model_digest if self.load is not None else ""
        return not model_digest or not own or own == model_digest

    def work(self) -> SchedulerWork:
        """What it has to do."""
        load, credit = self.load or LoadSnapshot(), self.credit
        return SchedulerWork(
            name=self.address,
            num_sequences=load.num_running + load.num_waiting + credit.num_sequences,
            num_tokens=load.num_waiting_tokens + load.num_catch_up_tokens + credit.num_tokens,
            num_seats=load.max_num_seqs,
            num_step_tokens=load.max_num_batched_tokens,
        )

    def look(self) -> int:
        """Looks since it said something; one that has not named its run gives no signs of life."""
        gives_signs = self.load is not None and bool(self.load.instance_id)
        return self.client.silence.look(is_promised=self.is_reached and gives_signs)

    def _take_state(self, is_reached: bool) -> None:
        self.load, self.is_twin = None, False
        self.credit.clear()
        self._on_state(is_reached)

    def _take_load(self, load: LoadSnapshot) -> None:
        self.load = load
        self.credit.look()
        self._on_load(load)
