from services.worker.orders import LocalOrders, Stop


def test_orders_are_taken_in_the_order_given() -> None:
    orders = LocalOrders()
    given = [Stop(), Stop(), Stop()]
    for order in given:
        orders.put(order)
    assert [orders.get() for _ in given] == given
