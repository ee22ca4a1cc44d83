"""What each rank does in tests of constrained rows: one rank has the masks, all have the tokens."""

from typing import Any

from services.worker.orders import Stop
from shared.constraint import Constraint, FormatKind, TextFormat
from tests.services.worker.parallel.executor_cases import (
    Replica,
    rank_settings,
    run_jobs,
    start,
)

_PATIENCE_S = 40.0
EOS = (846, 848, 850)


def make_jobs(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Jobs whose "regex" is a constraint."""
    jobs = []
    for one in given:
        job = {**one, "eos_token_ids": EOS, "max_tokens": 60}
        pattern = job.pop("regex", None)
        if pattern is not None:
            form = TextFormat(kind=FormatKind.REGEX, text=pattern)
            job["constraint"] = Constraint(format=form)
        jobs.append(job)
    return jobs


def run_constrained(
    rank: int, rendezvous: str, path: str, topology: str, jobs: list[dict[str, Any]], **flags: Any
) -> Any:
    """One replica runs its jobs; its leader returns what became of them."""
    settings = rank_settings(rank, rendezvous, path, topology, **flags)
    world, runner, orders = start(settings)
    found: Any = None
    if settings.is_leader:
        found = run_jobs(Replica(runner, orders), make_jobs(jobs))
        orders.put(Stop())
    assert runner.join(_PATIENCE_S)
    assert not world.verdict, world.verdict
    world.leave()
    return found
