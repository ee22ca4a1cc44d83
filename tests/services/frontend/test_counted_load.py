"""No counter falls, whatever is lost and comes back in whatever order."""

from dataclasses import fields, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from services.detokenizer.summed_load import SummedLoad
from services.frontend.counted_load import CountedLoad
from services.frontend.metrics import GatewayMetrics
from shared.sampling import LoadSnapshot, ReplicaLoad

NOTHING = LoadSnapshot()


def told(run: str = "a", steps: int = 0, **values: Any) -> LoadSnapshot:
    facts = {"num_reached_schedulers": 1, "num_steps_total": steps}
    return LoadSnapshot(instance_id=run, **(facts | values))


class Pool:
    """Detokenizers of a gateway; all are good sources until lost."""

    def __init__(self, count: int = 2) -> None:
        self.ranks = [2] * count
        self.counted = CountedLoad(count, self.ranks.__getitem__)

    @property
    def steps(self) -> int:
        return self.counted.shown(NOTHING).num_steps_total

    @property
    def losses(self) -> int:
        return self.counted.shown(NOTHING).num_scheduler_losses_total

    def take(self, number: int, load: LoadSnapshot) -> None:
        self.ranks[number] = 2
        self.counted.take(number, load)


def test_the_first_detokenizer_sets_the_scale_and_the_last_count_stays() -> None:
    pool = Pool()
    pool.take(0, told("a", 100))
    assert pool.steps == 100
    pool.take(0, told("a", 130))
    pool.ranks[0] = 0
    assert pool.steps == 130, "nobody is left"
    pool.take(0, told("a", 150))
    assert pool.steps == 150, "only the connection was lost"


def test_another_one_goes_on_where_the_source_was_lost() -> None:
    """It began later, and counts less."""
    pool = Pool()
    pool.take(0, told("a", 100))
    pool.take(1, told("b", 30))
    for more in (5, 9):
        pool.take(0, told("a", 100 + more))
        pool.take(1, told("b", 30 + more))
        assert pool.steps == 100 + more
    # The source stands still before it is found lost.
    pool.take(1, told("b", 42))
    assert pool.steps == 109
    pool.ranks[0] = 0
    pool.take(1, told("b", 44))
    assert pool.steps == 114
    pool.take(0, told("a", 114))
    assert pool.steps == 114, "the source stays as long as it is as good"


def test_one_that_begins_has_nothing_to_make_up() -> None:
    """What the source said before is no work that the other one has yet to tell of."""
    pool = Pool()
    pool.take(0, told("a", 100))
    pool.take(1, told("b", 30))
    pool.ranks[0] = 0
    pool.take(1, told("b", 39))
    assert pool.steps == 109


def test_one_that_starts_anew_counts_only_what_happens_from_then_on() -> None:
    """It learns of schedulers one by one, and of what they counted in their lives."""
    pool = Pool(1)
    pool.take(0, told("a", 1_000, num_reached_schedulers=2))
    pool.ranks[0] = 0
    for steps, known, shown in ((0, 0, 1_000), (700, 1, 1_000), (710, 1, 1_010), (1_020, 2, 1_010)):
        pool.take(0, told("b", steps, num_reached_schedulers=known))
        assert pool.steps == shown
    pool.take(0, told("b", 1_015, num_reached_schedulers=1))
    assert pool.steps == 1_010
    pool.take(0, told("b", 1_030, num_reached_schedulers=2))
    assert pool.steps == 1_025, "one that was lost for a while is nothing new"


def test_what_detokenizers_count_themselves_adds_up_over_their_runs() -> None:
    pool = Pool()
    for number, run, losses, shown in (
        (0, "a", 2, 2), (1, "b", 1, 3), (0, "a", 3, 4), (0, "c", 3, 7), (1, "d", 0, 7),
        (1, "d", 1, 8),
    ):  # fmt: skip
        pool.take(number, told(run, num_scheduler_losses_total=losses))
        assert pool.losses == shown


def test_gauges_are_those_of_the_snapshot() -> None:
    pool = Pool(1)
    pool.take(0, told(replicas=(ReplicaLoad(num_steps_total=7),)))
    latest = LoadSnapshot(num_running=3, replicas=(ReplicaLoad(num_running=2),))
    shown = pool.counted.shown(latest)
    assert (shown.num_running, shown.replicas[0].num_running) == (3, 2)
    assert shown.replicas[0].num_steps_total == 7


COUNTERS = [
    field.name
    for field in fields(LoadSnapshot)
    if field.name.endswith("_total") and field.name not in (
        "num_scheduler_losses_total", "num_resubmissions_total", "num_unresumed_total"
    )
]  # fmt: skip


class Mesh:
    """Real sums of schedulers that are lost and start anew, told by detokenizers that do so too."""

    def __init__(self) -> None:
        self.runs = 0
        self.schedulers = [self.scheduler() for _ in range(2)]
        self.sums = [SummedLoad(2) for _ in range(2)]
        self.ids = ["d0", "d1"]
        self.lost = [0, 0]
        self.loads = [NOTHING, NOTHING]
        self.ranks = [0, 0]
        self.counted = CountedLoad(2, self.ranks.__getitem__)
        self.metrics = GatewayMetrics("m", lambda: self.counted.shown(self.latest))
        self.totals: dict[str, float] = {}

    @property
    def latest(self) -> LoadSnapshot:
        number = max(range(2), key=self.ranks.__getitem__)
        return self.loads[number] if self.ranks[number] else NOTHING

    def scheduler(self) -> LoadSnapshot:
        self.runs += 1
        return LoadSnapshot(instance_id=f"s{self.runs}", is_worker_ready=True)

    def work(self, number: int) -> None:
        load = self.schedulers[number]
        replica = (load.replicas or (ReplicaLoad(),))[0]
        counts = {name: getattr(load, name) + 5 for name in COUNTERS}
        self.schedulers[number] = replace(
            load,
            num_accepted_tokens_per_position=(load.num_steps_total, 1),
            replicas=(replace(replica, num_steps_total=replica.num_steps_total + 5),) * 2,
            **counts,
        )

    def act(self, what: str, number: int) -> None:
        if what == "work":
            self.work(number)
        elif what == "scheduler restarts":
            self.schedulers[number] = self.scheduler()
        elif what == "detokenizer restarts":
            self.sums[number], self.lost[number] = SummedLoad(2), 0
            self.ids[number] += "'"
            self.ranks[number] = 0
        elif what == "scheduler is lost":
            for at, one in enumerate(self.sums):
                one.lose(number)
                self.lost[at] += 1
        elif what == "connection breaks":
            self.ranks[number] = 0
        elif what == "scheduler tells":
            for one in self.sums:
                one.take(number, self.schedulers[number])
        else:
            self.ranks[number] = 2
            mine = {"instance_id": self.ids[number]}
            counts = {"num_scheduler_losses_total": self.lost[number]}
            self.loads[number] = replace(self.sums[number].sum(), **mine, **counts)
            self.counted.take(number, self.loads[number])

    def check(self) -> None:
        page = self.metrics.render().decode().splitlines()
        kinds = {line.split()[2]: line.split()[3] for line in page if line.startswith("# TYPE")}
        for line in page:
            series, _, value = line.rpartition(" ")
            name = series.partition("{")[0]
            if line.startswith("#") or not name.endswith("_total"):
                continue
            assert kinds[name] == "counter", name
            assert float(value) >= self.totals.get(series, 0), series
            self.totals[series] = float(value)


EVENTS = (
    "work", "scheduler tells", "detokenizer tells", "scheduler restarts", "scheduler is lost",
    "detokenizer restarts", "connection breaks",
)  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 1)), max_size=60))
def test_no_total_ever_falls(events: list[tuple[str, int]]) -> None:
    mesh = Mesh()
    for what, number in events:
        mesh.act(what, number)
        mesh.check()


def test_totals_follow_the_work_through_losses() -> None:
    """Not only do they not fall: work that is told is counted, once."""
    mesh = Mesh()
    rounds = ("work", "scheduler tells", "detokenizer tells")
    for number in (0, 1):
        mesh.act("scheduler tells", number)
    for number in (0, 1):
        mesh.act("detokenizer tells", number)
    lost = {2: "connection breaks", 4: "detokenizer restarts", 6: "scheduler restarts"}
    for turn in range(8):
        if turn in lost:
            mesh.act(lost[turn], 0)
            if turn == 4:
                for number in (0, 1):
                    mesh.act("scheduler tells", number)
                mesh.act("detokenizer tells", 0)
        for what in rounds:
            for number in (0, 1):
                mesh.act(what, number)
    mesh.check()
    assert mesh.totals["glm_mesh:recomputed_tokens_total"] == 8 * 2 * 5
