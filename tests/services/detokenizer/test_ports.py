"""The ports are structural; these assignments are checked by mypy, the calls here."""

from services.detokenizer.journey import Leg
from services.detokenizer.ports import LossListener, SequenceListener, TokenListener, Upstream
from services.detokenizer.response import Response
from services.detokenizer.schedulers import Schedulers
from shared.endings import AbortReason
from tests.services.detokenizer.frames import FakeUpstream


def methods(port: type) -> set[str]:
    return {name for name in vars(port) if not name.startswith("_")}


def test_the_schedulers_and_the_fake_are_upstreams() -> None:
    for kind in (Schedulers, FakeUpstream):
        assert methods(Upstream) <= set(dir(kind))


def test_a_response_listens() -> None:
    assert methods(TokenListener) | methods(SequenceListener) <= set(dir(Response))


def test_a_leg_listens_and_knows_of_losses() -> None:
    assert methods(TokenListener) | methods(LossListener) <= set(dir(Leg))


def test_an_abort_needs_no_count() -> None:
    upstream = FakeUpstream()
    upstream.abort(3, AbortReason.CANCELLED)
    assert upstream.aborts == [(3, AbortReason.CANCELLED, 0)]
