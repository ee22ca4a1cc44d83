import asyncio
import io
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partialmethod
from pathlib import Path

import pytest

from services.launcher import supervisor as module
from services.launcher.commands import Command
from services.launcher.display import Display
from services.launcher.log_tail import LogTail
from services.launcher.ranks import Layout
from services.launcher.restarts import MAX_RESTARTS
from services.launcher.run_dir import SERVICES, STATE_FILE, RunDirectory, make_run_directory
from services.launcher.supervisor import Supervisor
from shared.parent import PARENT_VARIABLE

# Against hanging: nothing here is about how fast a loaded machine starts Python.
LIMIT_S = 60.0
FAKE = str(Path(__file__).parent / "fake_service.py")


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STOP_LIMIT_S", LIMIT_S)


class Mesh:
    """A supervisor over fake services, and what it showed."""

    def __init__(
        self,
        path: Path,
        *,
        layout: Layout | None = None,
        more: Sequence[str] = (),
        **flags: list[str],
    ) -> None:
        self.run_dir: RunDirectory = make_run_directory(path)
        self.screen = io.StringIO()
        self.stop = asyncio.Event()
        environment = {
            **os.environ,
            PARENT_VARIABLE: str(os.getpid()),
            "PYTHONPATH": str(Path(__file__).resolve().parents[3]),
        }
        ranks = {rank.name: rank for rank in (layout or Layout()).ranks()}
        commands = [
            Command(
                service=name,
                argv=(
                    sys.executable,
                    FAKE,
                    "--health-address",
                    self.run_dir.health_address(name),
                    *flags.get(re.sub("[.-]", "_", name), flags.get("every", [])),
                ),
                environment=environment,
                rank=ranks[name] if len(ranks) > 1 and name in ranks else None,
                meeting=self.run_dir.rendezvous_path(0),
            )
            for name in (*ranks, *SERVICES[1:], *more)
        ]
        self.supervisor = Supervisor(
            commands, self.run_dir, Display(self.screen), url="http://h:1", model="m", version="1"
        )

    async def run(self, start_timeout_s: float = LIMIT_S) -> int:
        return await self.supervisor.run(self.stop, start_timeout_s=start_timeout_s)

    async def until(self, condition: Callable[[str], bool], limit_s: float = LIMIT_S) -> str:
        end = time.monotonic() + limit_s
        while not condition(self.screen.getvalue()):
            assert time.monotonic() < end, self.screen.getvalue()
            await asyncio.sleep(0.02)
        return self.screen.getvalue()

    def pid(self, name: str) -> int:
        return self.supervisor._pids()[name]

    async def end_again(self, name: str, times: int, number: int) -> None:
        """Signal a process again and again, each time once it runs (listens to signals)."""
        sign = "ready" if number == signal.SIGTERM else "started again"
        for _ in range(times):
            before = self.screen.getvalue().count(f"\n{name}: {sign}")
            os.kill(self.pid(name), number)
            await self.until(
                lambda text, before=before: (  # type: ignore[misc]  # binds now
                    text.count(f"\n{name}: {sign}") > before or "giving up" in text
                )
            )

    async def kill_until_given_up(self, *names: str) -> None:
        """Kill these processes of one unit in turn, each time all of them run again."""
        for number in range(MAX_RESTARTS + 1):
            os.kill(self.pid(names[number % len(names)]), signal.SIGKILL)
            await self.until(
                lambda text, number=number: (  # type: ignore[misc]  # binds now
                    "giving up" in text
                    or all(text.count(f"\n{name}: started again") > number for name in names)
                )
            )


async def test_a_mesh_comes_up_says_what_is_where_and_stops_in_order(tmp_path: Path) -> None:
    order = tmp_path / "order"
    mesh = Mesh(tmp_path / "r", every=["--order-file", str(order)])
    running = asyncio.create_task(mesh.run())
    screen = await mesh.until(lambda text: "Ctrl-C" in text)
    pids = [mesh.pid(name) for name in SERVICES]
    assert "serves m at http://h:1/v1" in screen
    assert all(f"pid {pid}" in screen for pid in pids)
    assert (mesh.run_dir.path / "mesh.json").exists()
    mesh.stop.set()
    assert await asyncio.wait_for(running, LIMIT_S) == 0
    assert order.read_text().split() == ["frontend", "detokenizer", "scheduler", "worker"]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not list(mesh.run_dir.path.glob("*.sock"))


async def test_warnings_of_a_service_are_shown_with_its_name(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path / "r")
    running = asyncio.create_task(mesh.run())
    shown = "worker| x WARNING fake fake: a warning\nworker|     with a second line\n"
    screen = await mesh.until(lambda text: shown in text and "Ctrl-C" in text)
    assert "started pid" not in screen
    mesh.stop.set()
    await running


async def test_a_killed_service_is_reported_and_started_again(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path / "r")
    running = asyncio.create_task(mesh.run())
    await mesh.until(lambda text: "Ctrl-C" in text)
    before = mesh.pid("scheduler")
    os.kill(before, signal.SIGKILL)
    screen = await mesh.until(lambda text: "scheduler: ready" in text.split("Ctrl-C")[1])
    assert f"scheduler (pid {before}) ended: killed by SIGKILL" in screen
    assert f"  scheduler| x INFO fake fake: started pid {before}" in screen
    assert "scheduler: starting again in 0.1 s" in screen
    assert mesh.pid("scheduler") != before
    mesh.stop.set()
    assert await running == 0


async def test_a_service_that_keeps_dying_ends_the_mesh(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path / "r")
    running = asyncio.create_task(mesh.run())
    await mesh.until(lambda text: "Ctrl-C" in text)
    await mesh.kill_until_given_up("worker")
    assert await asyncio.wait_for(running, LIMIT_S) == 1
    assert "worker keeps ending (3 restarts in 60 s): giving up" in mesh.screen.getvalue()
    assert f"logs are in {mesh.run_dir.path}" in mesh.screen.getvalue()


async def test_a_service_that_keeps_dying_beside_a_ready_sibling_is_tried_on(
    tmp_path: Path,
) -> None:
    mesh = Mesh(tmp_path / "r", more=["scheduler-1"])
    running = asyncio.create_task(mesh.run())
    await mesh.until(lambda text: "Ctrl-C" in text)
    serving = mesh.pid("scheduler-1")
    await mesh.end_again("scheduler", MAX_RESTARTS + 2, signal.SIGKILL)
    screen = mesh.screen.getvalue()
    told = "scheduler keeps ending (4 times in a row), another scheduler serves on: starting again"
    assert f"{told} in 1.0 s" in screen
    assert f"{told.replace('4', '5')} in 2.0 s" in screen
    assert not running.done()
    assert mesh.pid("scheduler-1") == serving
    page = json.loads((mesh.run_dir.path / STATE_FILE).read_text())
    failing = page["services"]["scheduler"]["failing"]
    assert failing["num_failures"] == MAX_RESTARTS + 2
    assert abs(failing["next_start_at"] - time.time()) < LIMIT_S
    assert "failing" not in page["services"]["scheduler-1"]
    # An end that was asked for is none of these failures, and forgets none.
    await mesh.until(lambda _: mesh.supervisor._states["scheduler"] == "ready")
    await mesh.end_again("scheduler", 1, signal.SIGTERM)
    assert "\nscheduler: starting again in 0.5 s" in mesh.screen.getvalue()
    page = json.loads((mesh.run_dir.path / STATE_FILE).read_text())
    assert page["services"]["scheduler"]["failing"] == failing
    mesh.stop.set()
    assert await running == 0


async def test_a_sibling_that_is_not_ready_keeps_nothing_alive(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path / "r", more=["scheduler-1"])
    running = asyncio.create_task(mesh.run())
    await mesh.until(lambda text: "Ctrl-C" in text)
    mesh.supervisor._states["scheduler-1"] = "getting ready"
    await mesh.end_again("scheduler", MAX_RESTARTS + 1, signal.SIGKILL)
    assert await asyncio.wait_for(running, LIMIT_S) == 1
    assert "scheduler keeps ending (3 restarts in 60 s): giving up" in mesh.screen.getvalue()


async def test_a_clean_end_is_no_failure_however_often(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path / "r")
    running = asyncio.create_task(mesh.run())
    await mesh.until(lambda text: "Ctrl-C" in text)
    await mesh.end_again("scheduler", MAX_RESTARTS + 1, signal.SIGTERM)
    assert not running.done()
    os.kill(mesh.pid("scheduler"), signal.SIGKILL)
    await mesh.until(lambda text: "scheduler: starting again in 0.1 s" in text)
    assert mesh.screen.getvalue().count("scheduler: starting again in 0.5 s") == MAX_RESTARTS + 1
    mesh.stop.set()
    assert await running == 0


async def test_wrong_settings_later_end_the_mesh_only_if_nobody_else_serves(tmp_path: Path) -> None:
    """Say, the checkpoint was moved: those that have read it serve on."""
    for more, ends in (([], True), (["detokenizer-1"], False)):
        late = tmp_path / "late"
        late.unlink(missing_ok=True)
        mesh = Mesh(tmp_path / "r", more=more, detokenizer=["--exit-2-if", str(late)])
        running = asyncio.create_task(mesh.run())
        await mesh.until(lambda text: "Ctrl-C" in text)
        late.touch()
        os.kill(mesh.pid("detokenizer"), signal.SIGKILL)
        told = "cannot start with these" if ends else "ended: exit code 2"
        await mesh.until(lambda text, told=told: told in text)  # type: ignore[misc]  # binds now
        late.unlink()
        if not ends:
            await mesh.until(lambda text: "\ndetokenizer: ready" in text.split("Ctrl-C")[1])
            mesh.stop.set()
        assert await asyncio.wait_for(running, LIMIT_S) == (2 if ends else 0)


@pytest.mark.parametrize(("code", "expected"), [(2, 2), (7, 1), (0, 1)])
async def test_a_service_that_cannot_start_ends_the_mesh_with_its_last_words(
    tmp_path: Path, code: int, expected: int
) -> None:
    mesh = Mesh(tmp_path / "r", scheduler=["--exit-code", str(code)])
    assert await asyncio.wait_for(mesh.run(), LIMIT_S) == expected
    screen = mesh.screen.getvalue()
    assert f"ended: exit code {code}" in screen
    assert "  scheduler| x ERROR fake fake: last words" in screen
    assert mesh.run_dir.log_path("scheduler").exists()  # asked for, so kept
    # The cause stands last: what the others say while they are stopped is noise.
    last = screen.rstrip().rsplit("\n", 1)[1]
    assert last.startswith("glm-mesh: scheduler" if code == 2 else "logs are in")
    told = screen[screen.index("glm-mesh: scheduler") :]
    assert "getting ready" not in told
    assert "away" not in told


async def test_a_mesh_that_never_gets_ready_is_given_up(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path / "r", detokenizer=["--never-ready"])
    assert await asyncio.wait_for(mesh.run(start_timeout_s=3.0), LIMIT_S) == 1
    # On a slow machine others may be late as well.
    assert re.search("not ready after 3 s: .*detokenizer", mesh.screen.getvalue())


async def test_a_launcher_that_breaks_ends_the_mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: object) -> None:
        raise RuntimeError("disk")

    monkeypatch.setattr(Supervisor, "_show_loud_lines", broken)
    mesh = Mesh(tmp_path / "r")
    assert await asyncio.wait_for(mesh.run(), LIMIT_S) == 1
    assert "the launcher failed: RuntimeError('disk')" in mesh.screen.getvalue()


async def test_stop_while_starting_leaves_nothing(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path / "r", worker=["--never-ready"])
    running = asyncio.create_task(mesh.run())
    await mesh.until(lambda text: "worker: getting ready" in text)
    pids = [mesh.pid(name) for name in SERVICES]
    mesh.stop.set()
    assert await asyncio.wait_for(running, LIMIT_S) == 0
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_a_deaf_service_is_killed_after_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STOP_LIMIT_S", 0.5)
    mesh = Mesh(tmp_path / "r", worker=["--deaf"])
    running = asyncio.create_task(mesh.run())
    await mesh.until(lambda text: "Ctrl-C" in text)
    mesh.stop.set()
    assert await asyncio.wait_for(running, LIMIT_S) == 0
    assert "worker: did not stop in 0.5 s, killed" in mesh.screen.getvalue()


async def test_a_second_signal_kills_at_once(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path / "r", every=["--deaf"])
    running = asyncio.create_task(mesh.run())
    await mesh.until(lambda text: "Ctrl-C" in text)
    mesh.stop.set()
    await mesh.until(lambda _: mesh.supervisor._is_stopping)
    started = time.monotonic()
    mesh.supervisor.kill_all()
    await asyncio.wait_for(running, LIMIT_S)
    assert time.monotonic() - started < LIMIT_S / 2


async def test_a_dead_rank_takes_its_world_along_and_all_are_started_again(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path / "r", layout=Layout(tensor_parallel_size=2))
    running = asyncio.create_task(mesh.run())
    screen = await mesh.until(lambda text: "Ctrl-C" in text)
    assert f"worker.1     pid {mesh.pid('worker.1')}" in screen
    assert "worker.1: " not in screen  # it has no health of its own
    before = [mesh.pid(name) for name in ("worker", "worker.1")]
    scheduler = mesh.pid("scheduler")
    os.kill(before[1], signal.SIGKILL)
    screen = await mesh.until(lambda text: "worker: ready" in text.split("Ctrl-C")[1])
    assert f"worker.1, rank 1 (pid {before[1]}) ended: killed by SIGKILL" in screen
    assert f"(pid {before[0]}) ended" not in screen
    assert "worker (all ranks of world 0): starting again in 0.1 s" in screen
    after = [mesh.pid(name) for name in ("worker", "worker.1")]
    assert not set(before) & set(after)
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert mesh.pid("scheduler") == scheduler
    mesh.stop.set()
    assert await running == 0
    for pid in after:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_a_world_that_keeps_dying_ends_the_mesh_whichever_rank_it_is(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path / "r", layout=Layout(tensor_parallel_size=2))
    running = asyncio.create_task(mesh.run())
    await mesh.until(lambda text: "Ctrl-C" in text)
    await mesh.kill_until_given_up("worker", "worker.1")
    assert await asyncio.wait_for(running, LIMIT_S) == 1
    told = "worker (all ranks of world 0) keeps ending (3 restarts in 60 s): giving up"
    assert told in mesh.screen.getvalue()


async def test_a_rank_with_wrong_settings_ends_the_mesh(tmp_path: Path) -> None:
    mesh = Mesh(
        tmp_path / "r", layout=Layout(tensor_parallel_size=2), worker_1=["--exit-code", "2"]
    )
    assert await asyncio.wait_for(mesh.run(), LIMIT_S) == 2
    screen = mesh.screen.getvalue()
    assert "  worker.1| x ERROR fake fake: last words" in screen
    assert "cannot start with these settings" in screen


async def test_logs_are_bounded_while_the_mesh_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LogTail, "rotate", partialmethod(LogTail.rotate, limit=10))
    mesh = Mesh(tmp_path / "run")
    running = asyncio.create_task(mesh.run())
    await mesh.until(lambda screen: "h:1" in screen)
    aside = [tmp_path / "run" / f"{name}.log.1" for name in SERVICES]
    await mesh.until(lambda _: all(path.exists() for path in aside))
    mesh.stop.set()
    assert await running == 0
