import os
import sys
from pathlib import Path

import pytest

from services.launcher import unit as module
from services.launcher.commands import Command
from services.launcher.log_tail import LogTail
from services.launcher.process import ServiceProcess
from services.launcher.ranks import Layout
from services.launcher.unit import EXIT_WORLD_LOST, Death, Unit, gather_units, is_clean

SLEEP = "import time; time.sleep(30)"


def process(tmp_path: Path, name: str, code: str, **options: object) -> ServiceProcess:
    command = Command(
        service=name,
        argv=(sys.executable, "-c", code),
        environment=dict(os.environ),
        **options,  # type: ignore[arg-type]  # of the tests
    )
    return ServiceProcess(command, LogTail(tmp_path / f"{name}.log"))


def world(tmp_path: Path, *codes: str) -> Unit:
    ranks = Layout(tensor_parallel_size=len(codes)).ranks()
    meeting = tmp_path / "meet"
    processes = [
        process(tmp_path, rank.name, code, rank=rank, meeting=meeting)
        for rank, code in zip(ranks, codes, strict=True)
    ]
    (unit,) = gather_units(processes)
    return unit


async def test_the_first_rank_that_ends_takes_the_others_along(tmp_path: Path) -> None:
    unit = world(tmp_path, SLEEP, "exit(3)", SLEEP)
    await unit.start()
    (death,) = await unit.wait_death()
    assert (death.process.service, death.code) == ("worker.1", 3)
    assert not any(process.is_running for process in unit.processes)


async def test_a_stopped_rank_does_not_outlive_its_world(tmp_path: Path) -> None:
    stopped = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    unit = world(tmp_path, "import time; time.sleep(0.3); exit(1)", stopped)
    await unit.start()
    assert [death.process.service for death in await unit.wait_death()] == ["worker"]
    assert not unit.processes[1].is_running


async def test_a_killed_rank_is_told_before_those_that_failed_because_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ECHO_S", 60.0)  # however far apart a slow machine starts them
    unit = world(tmp_path, "exit(3)", "import os; os.kill(os.getpid(), 9)")
    await unit.start()
    deaths = await unit.wait_death()
    assert [(death.process.service, death.code) for death in deaths] == [
        ("worker.1", -9),
        ("worker", 3),
    ]


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([0], True),
        ([0, EXIT_WORLD_LOST], True),  # the other rank lost the one that was asked to end
        ([EXIT_WORLD_LOST], False),
        ([0, 1], False),
        ([-15], False),  # before it could listen to signals
        ([-9], False),
    ],
)
def test_only_an_end_without_any_error_is_clean(
    tmp_path: Path, codes: list[int], expected: bool
) -> None:
    one = process(tmp_path, "scheduler", "")
    assert is_clean([Death(process=one, code=code) for code in codes]) is expected


async def test_each_start_meets_at_a_new_place(tmp_path: Path) -> None:
    unit = world(tmp_path, "", "")
    (tmp_path / "meet").write_text("of the last world")
    await unit.start()
    assert not (tmp_path / "meet").exists()
    await unit.wait_death()


async def test_stopping_ends_all_ranks_at_once_and_names_the_deaf(tmp_path: Path) -> None:
    deaf = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('deaf', flush=True)\ntime.sleep(30)"
    )
    unit = world(tmp_path, SLEEP, deaf)
    await unit.start()
    while not unit.processes[1].tail.last_lines(1):
        assert unit.processes[1].is_running
    killed = await unit.stop(3.0)
    assert [process.service for process in killed] == ["worker.1"]
    assert not any(process.is_running for process in unit.processes)


@pytest.mark.parametrize(
    ("is_expert_parallel", "names"),
    [(False, [["worker", "worker.1"], ["worker.2", "worker.3"]]), (True, [])],
)
def test_units_are_the_worlds(
    tmp_path: Path, is_expert_parallel: bool, names: list[list[str]]
) -> None:
    layout = Layout(
        tensor_parallel_size=2, data_parallel_size=2, enable_expert_parallel=is_expert_parallel
    )
    ranks = [process(tmp_path, rank.name, "", rank=rank) for rank in layout.ranks()]
    units = gather_units([*ranks, process(tmp_path, "scheduler", "")])
    found = [[process.service for process in unit.processes] for unit in units]
    joint = [["worker", "worker.1", "worker.2", "worker.3"]]
    assert found == [*(names or joint), ["scheduler"]]
    assert [unit.kind for unit in units] == [*["worker"] * len(units[:-1]), "scheduler"]
    assert units[0].told == "worker (all ranks of world 0)"
    assert units[-1].told == "scheduler"
