"""One rank of a world, as its process sees it: built on the runner's thread, asked from others."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from services.worker.grammar.compiler import GrammarCompiler
from services.worker.model_build import build_model_executor
from services.worker.orders import OrderSource
from services.worker.parallel.orders import FollowingOrders, LeadingOrders
from services.worker.parallel.rendezvous import JoinError
from services.worker.parallel.seat import Seating
from services.worker.plan import StepPlan
from services.worker.ranks import Together
from services.worker.runner import BuildStoppedError, StepExecutor, WorldLostError
from services.worker.settings import WorkerSettings

_ECHO_S: Final = 5.0
_POLL_S: Final = 0.05


class WorldRank:
    """Builds this rank's executor and knows whether the world stands."""

    def __init__(self, settings: WorkerSettings, grammars: GrammarCompiler | None = None) -> None:
        """`grammars` are those that requests are prepared with, in the rank that answers."""
        self._settings = settings
        self._grammars = grammars
        self._seating = Seating(settings)

    @property
    def verdict(self) -> str:
        """Why the world is lost, naming rank and step; empty while it stands."""
        return self._seating.verdict

    async def why_lost(self) -> str:
        """The verdict, which may be a moment away after an exchange broke."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ECHO_S):
                while not self.verdict:  # noqa: ASYNC110  # another thread hears of it
                    await asyncio.sleep(_POLL_S)
        return self.verdict or "a rank is lost, and nobody said which"

    def lead(self, orders: OrderSource) -> OrderSource:
        """The leader's orders, passed on to the other ranks of its replica, if it has any."""
        if self._settings.topology.replica_size == 1:
            return orders
        return LeadingOrders(orders, self._seating.orders)

    def follow(self, decode: Callable[[bytes], StepPlan]) -> OrderSource:
        """What the leader passes on."""
        return FollowingOrders(self._seating.orders, decode)

    def build(self, is_stopping: Callable[[], bool]) -> StepExecutor:
        """Meet the others, and build with them; who fails tells them.

        Raises:
            WorldLostError: Another rank failed.
        """
        settings, seating = self._settings, self._seating
        assert settings.model is not None

        def is_over() -> bool:
            return is_stopping() or bool(seating.verdict)

        try:
            seat = seating.take(is_over)
            return build_model_executor(
                settings, settings.model, is_over, Together(seat), self._grammars
            )
        except JoinError as error:
            raise WorldLostError(str(error)) from None
        except BuildStoppedError:
            if seating.verdict:
                raise WorldLostError(seating.verdict) from None
            raise
        except Exception as error:
            seating.fail(f"failed at its start: {error}")
            raise

    def leave(self) -> None:
        """Give the seat up in good order."""
        self._seating.leave()
