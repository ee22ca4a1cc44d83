"""An outlet gives what gathered once."""

from services.scheduler.outlet import Outlet


def test_what_gathered_is_taken_once() -> None:
    outlet = Outlet()
    add_stream, add_previous, add_count, add_token = outlet.appenders()
    add_stream(4)
    add_previous(10)
    add_count(1)
    add_token(77)
    delivery = outlet.take()
    assert delivery is not None
    assert delivery.tokens is not None
    assert delivery.tokens.stream_ids == [4]
    assert delivery.tokens.num_previous_tokens == [10]
    assert delivery.tokens.num_tokens == [1]
    assert delivery.tokens.token_ids.tolist() == [77]
    assert outlet.take() is None


def test_a_delivery_is_not_changed_by_what_comes_later() -> None:
    outlet = Outlet()
    outlet.appenders()[0](1)
    delivery = outlet.take()
    outlet.appenders()[0](2)
    assert delivery is not None
    assert delivery.tokens is not None
    assert delivery.tokens.stream_ids == [1]
