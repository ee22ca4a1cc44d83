from dataclasses import fields
from typing import Any

from services.detokenizer.summed_load import SummedLoad
from shared.sampling import LoadSnapshot, ReplicaLoad


def load(**values: Any) -> LoadSnapshot:
    told: dict[str, Any] = {
        "instance_id": "a",
        "is_worker_ready": True,
        "max_model_len": 100,
        "num_running": 2,
        "num_steps_total": 10,
        "max_gc_pause_us": 5,
        "num_accepted_tokens_per_position": (4, 1),
        "replicas": (ReplicaLoad(is_ready=True, num_running=2, num_steps_total=10),),
    }
    return LoadSnapshot(**(told | values))


def test_gauges_and_counters_add_up() -> None:
    summed = SummedLoad(2)
    summed.take(0, load())
    both = load(
        num_running=3, max_model_len=80, max_gc_pause_us=9, num_accepted_tokens_per_position=(1,)
    )
    summed.take(1, both)
    found = summed.sum()
    assert (found.num_running, found.num_steps_total) == (5, 20)
    assert found.max_model_len == 80, "what is taken in fits everywhere"
    assert found.max_gc_pause_us == 9
    assert found.num_accepted_tokens_per_position == (5, 1)
    assert len(found.replicas) == 2
    assert (found.num_schedulers, found.num_reached_schedulers) == (2, 2)
    assert found.is_worker_ready
    assert found.instance_id == ""


def test_one_scheduler_is_shown_as_it_is() -> None:
    """Whatever a snapshot tells: a field that is forgotten here would be missing at /metrics."""
    values: dict[str, Any] = {}
    for number, field in enumerate(fields(LoadSnapshot), 1):
        kinds = {"num_accepted_tokens_per_position": (3, 1), "replicas": (ReplicaLoad(),)}
        default = field.default
        values[field.name] = kinds.get(
            field.name, str(number) if isinstance(default, str) else number
        )
    values |= {"is_worker_ready": True, "is_draining": False}
    values |= {"num_schedulers": 1, "num_reached_schedulers": 1}
    summed = SummedLoad(1)
    summed.take(0, LoadSnapshot(**values))
    assert summed.sum() == LoadSnapshot(**(values | {"instance_id": ""}))


def test_a_lost_scheduler_keeps_its_counts_and_its_replicas_their_numbers() -> None:
    summed = SummedLoad(2)
    summed.take(0, load())
    summed.take(1, load(num_running=3))
    summed.lose(0)
    found = summed.sum()
    assert (found.num_running, found.num_steps_total) == (3, 20)
    assert [replica.is_ready for replica in found.replicas] == [False, True]
    assert found.replicas[0].num_steps_total == 10
    assert found.replicas[0].num_running == 0
    assert (found.num_schedulers, found.num_reached_schedulers) == (2, 1)
    summed.lose(1)
    found = summed.sum()
    assert (found.num_running, found.num_steps_total) == (0, 20)
    assert (found.is_worker_ready, found.max_model_len) == (False, 0)


def test_another_run_counts_on_from_the_earlier_one() -> None:
    summed = SummedLoad(1)
    assert not summed.take(0, load())
    assert not summed.take(0, load(num_steps_total=12))
    summed.lose(0)
    assert not summed.take(0, load(num_steps_total=13)), "only the connection was lost"
    assert summed.sum().num_steps_total == 13
    assert summed.take(0, load(instance_id="b", num_steps_total=1))
    assert summed.sum().num_steps_total == 14


def test_requests_are_taken_as_long_as_one_takes_them() -> None:
    summed = SummedLoad(2)
    summed.take(0, load(is_draining=True))
    summed.take(1, load(is_worker_ready=False))
    assert not summed.sum().is_worker_ready
    assert not summed.sum().is_draining
    summed.take(1, load())
    assert summed.sum().is_worker_ready
    summed.take(1, load(is_draining=True))
    assert summed.sum().is_draining


def test_before_anything_is_known_nothing_is_ready() -> None:
    found = SummedLoad(2).sum()
    assert found == LoadSnapshot(num_schedulers=2)


def test_replicas_count_on_over_the_runs_of_their_scheduler_and_keep_their_numbers() -> None:
    def replicas(*steps: int) -> tuple[ReplicaLoad, ...]:
        return tuple(ReplicaLoad(is_ready=True, num_steps_total=count) for count in steps)

    def shown() -> list[tuple[bool, int]]:
        return [(one.is_ready, one.num_steps_total) for one in summed.sum().replicas]

    summed = SummedLoad(2)
    summed.take(0, load(replicas=replicas(10, 20)))
    summed.take(1, load(replicas=replicas(7)))
    summed.take(0, load(instance_id="b", replicas=replicas(1)))
    assert shown() == [(True, 11), (False, 20), (True, 7)]
    summed.take(0, load(instance_id="b", replicas=replicas(2, 3)))
    assert shown() == [(True, 12), (True, 23), (True, 7)]
    summed.take(0, load(instance_id="c", replicas=replicas(4, 4)))
    assert shown() == [(True, 16), (True, 27), (True, 7)]
