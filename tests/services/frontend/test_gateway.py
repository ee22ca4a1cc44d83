"""What handlers share."""

import pytest

from services.frontend.errors import ApiError
from services.frontend.gateway import Gateway
from services.frontend.process import build_gateway
from services.frontend.settings import FrontendSettings
from shared.sampling import LoadSnapshot
from tests.services.frontend.conftest import MODEL_DIR


@pytest.mark.parametrize(("known", "length"), [(0, 8192), (100, 100), (9000, 8192)])
def test_the_least_limit_of_the_context_rules(
    lone_gateway: Gateway, monkeypatch: pytest.MonkeyPatch, known: int, length: int
) -> None:
    (client,) = lone_gateway.detokenizers.clients
    monkeypatch.setattr(client, "load", LoadSnapshot(max_model_len=known))
    assert lone_gateway.max_model_len == length


@pytest.mark.parametrize(
    ("is_connected", "is_worker_ready", "is_draining", "words"),
    [
        (False, False, "", "no detokenizer"),
        (True, False, "", "worker"),
        (True, True, "gateway", "draining"),
        (True, True, "detokenizer", "every detokenizer is draining"),
        (True, True, "", ""),
    ],
)
def test_ready_means_the_whole_chain(
    lone_gateway: Gateway,
    monkeypatch: pytest.MonkeyPatch,
    is_connected: bool,
    is_worker_ready: bool,
    is_draining: str,
    words: str,
) -> None:
    channel = object() if is_connected else None
    (client,) = lone_gateway.detokenizers.clients
    monkeypatch.setattr(client._link, "channel", channel)
    monkeypatch.setattr(client, "load", LoadSnapshot(is_worker_ready=is_worker_ready))
    monkeypatch.setattr(client, "is_draining", is_draining == "detokenizer")
    monkeypatch.setattr(lone_gateway.admission, "is_draining", is_draining == "gateway")
    assert words in lone_gateway.not_ready_reason
    assert bool(lone_gateway.not_ready_reason) is bool(words)


def test_served_names_and_none_are_taken_others_are_not_found(lone_gateway: Gateway) -> None:
    for name in (None, "nano", "alias"):
        lone_gateway.check_model(name)
    for name in ("", "Nano", "x" * 10**6):
        with pytest.raises(ApiError) as caught:
            lone_gateway.check_model(name)
        assert caught.value.status == 404
        assert len(caught.value.message) < 300


def test_gateways_with_the_same_seed_draw_the_same_seeds() -> None:
    def drawn(seed: int | None) -> list[int]:
        gateway = build_gateway(
            FrontendSettings(
                address="unix:/tmp/none.sock",
                detokenizer_address="unix:/tmp/none-d.sock",
                model=MODEL_DIR,
                seed=seed,
            )
        )
        return [gateway.seeds.draw() for _ in range(3)]

    assert drawn(1024) == drawn(1024)
    assert drawn(1024) != drawn(7)
    assert drawn(None) != drawn(None)
