"""What forwards are made in a step, and what each is told of the others."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.dummy import dummy_step
from services.worker.graphs.sizes import CaptureSizes
from services.worker.lockstep import Lockstep, OwnPace, limit_drafts
from services.worker.model.metadata import StepMetadata
from services.worker.parallel.moe_method import MoeMethod, MoeRules
from services.worker.plan import ContractError, StepPlan, Tick
from tests.services.worker.plans import Entry, make_plan

CPU = torch.device("cpu")
RULES = MoeRules(
    hardware="a3", ep_size=4, tp_size=1, num_experts=8, num_experts_per_tok=2, mc2_tokens=8
)
TICK = Tick(num_tokens=10, method=MoeMethod.ALLTOALL, num_draft_passes=3, num_draft_rows=2)


@dataclass
class Forwards:
    """The idle forwards that were made."""

    steps: list[StepMetadata] = field(default_factory=list)
    drafts: list[StepMetadata] = field(default_factory=list)

    def make(
        self,
        *,
        num_replicas: int = 2,
        row_multiple: int = 1,
        has_mtp: bool = True,
        sizes: CaptureSizes | None = None,
    ) -> Lockstep:
        return Lockstep(
            RULES,
            num_replicas=num_replicas,
            row_multiple=row_multiple,
            has_drafts=True,
            run_idle=self.steps.append,
            run_idle_draft=self.drafts.append if has_mtp else None,
            device=CPU,
            sizes=sizes,
        )


def plan_of(num_tokens: int, tick: Tick | None = TICK) -> StepPlan:
    entries = {0: Entry(scheduled=num_tokens)} if num_tokens else {}
    plan: Any = make_plan(1, entries)
    return StepPlan(**{name: getattr(plan, name) for name in StepPlan.__slots__} | {"tick": tick})


def step_of(num_tokens: int) -> StepMetadata:
    return dummy_step(1, num_tokens, CPU)[1]


def traffic(step: StepMetadata) -> tuple[MoeMethod, int]:
    assert step.traffic is not None
    return step.traffic.method, step.traffic.num_tokens


def test_every_forward_is_told_the_largest_replica() -> None:
    pace = Forwards().make()
    pace.begin(plan_of(4))
    assert traffic(pace.in_step(step_of(4))) == (MoeMethod.ALLTOALL, 10)
    assert traffic(pace.in_draft(step_of(4))) == (MoeMethod.ALLTOALL, 10)
    assert traffic(pace.in_draft(step_of(1))) == (MoeMethod.ALLTOALL, 2)
    assert pace.most_drafts() == (3, 2)


def test_a_replica_that_runs_out_of_rows_makes_the_missing_passes() -> None:
    forwards = Forwards()
    pace = forwards.make()
    pace.begin(plan_of(4))
    pace.in_step(step_of(4))
    pace.in_draft(step_of(4))
    pace.finish()
    assert [traffic(step)[1] for step in forwards.drafts] == [2, 2]
    assert not forwards.steps
    pace.finish()
    assert len(forwards.drafts) == 2


@pytest.mark.parametrize("has_mtp", [True, False])
def test_a_replica_without_rows_makes_every_forward(has_mtp: bool) -> None:
    forwards = Forwards()
    pace = forwards.make(has_mtp=has_mtp)
    pace.begin(plan_of(0))
    pace.idle()
    pace.finish()
    (step,) = forwards.steps
    assert traffic(step) == (MoeMethod.ALLTOALL, 10)
    # It belongs to nobody: it reads nothing and writes into the scratch block.
    assert step.num_tokens == 1
    assert step.seq_lens.tolist() == [0]
    assert step.slot_mapping.tolist() == [0]
    # An earlier stage has no layer that drafts.
    assert [traffic(one)[1] for one in forwards.drafts] == ([10, 2, 2] if has_mtp else [])


def test_sizes_are_padded_as_steps_are() -> None:
    forwards = Forwards()
    pace = forwards.make(row_multiple=4)
    pace.begin(plan_of(0))
    pace.idle()
    assert forwards.steps[0].num_tokens == 4
    assert traffic(forwards.steps[0])[1] == 12


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (plan_of(3, None), "needs a tick"),
        (plan_of(11), "11 tokens are more than num_tokens 10 of the tick"),
        (
            plan_of(3, Tick(num_tokens=3, method=MoeMethod.MC2)),
            "num_draft_passes of the tick must be at least 1",
        ),
    ],
)
def test_a_plan_that_does_not_fit_its_tick_is_refused(plan: StepPlan, said: str) -> None:
    with pytest.raises(ContractError, match=said):
        Forwards().make().begin(plan)


SIZES = CaptureSizes(rows_per_seq=4, sizes=(4, 8, 32))


def captured(num_seqs: int, num_tokens: int) -> Tick:
    return replace(TICK, num_tokens=num_tokens, captured_num_seqs=num_seqs)


def test_all_replicas_take_the_captured_step_of_the_tick() -> None:
    pace = Forwards().make(sizes=SIZES)
    assert pace.captured_num_seqs() is None
    pace.begin(plan_of(4, captured(2, 8)))
    assert pace.captured_num_seqs() == 2
    assert traffic(pace.in_step(step_of(8))) == (MoeMethod.ALLTOALL, 8)
    pace.begin(plan_of(4))
    assert pace.captured_num_seqs() == 0
    assert OwnPace().captured_num_seqs() is None


@pytest.mark.parametrize(
    ("num_tokens", "tick", "said", "meets_in"),
    [
        (4, captured(3, 12), "captured_num_seqs 3 of the tick is no captured size", 0),
        (4, captured(2, 9), "num_tokens 9 of the tick is not that of 2 sequences of 4", 0),
        (5, captured(2, 8), "1 sequences of up to 5 tokens are more than the captured step", 2),
    ],
)
def test_a_captured_step_that_cannot_be_is_refused(
    num_tokens: int, tick: Tick, said: str, meets_in: int
) -> None:
    pace = Forwards().make(sizes=SIZES)
    with pytest.raises(ContractError, match=said):
        pace.begin(plan_of(num_tokens, tick))
    # What all replicas refuse they do without; what one refuses it takes part in without rows.
    assert pace.captured_num_seqs() == meets_in
    with pytest.raises(ContractError, match="is no captured size"):
        Forwards().make().begin(plan_of(4, captured(2, 8)))


def test_a_refused_plan_is_still_a_step_for_the_others() -> None:
    forwards = Forwards()
    pace = forwards.make()
    with pytest.raises(ContractError):
        pace.begin(plan_of(11))
    pace.idle()
    pace.finish()
    assert (len(forwards.steps), len(forwards.drafts)) == (1, 3)


def test_a_single_replica_chooses_by_its_own_tokens() -> None:
    forwards = Forwards()
    pace = forwards.make(num_replicas=1)
    pace.begin(plan_of(4, None))
    assert traffic(pace.in_step(step_of(8))) == (MoeMethod.MC2, 8)
    assert traffic(pace.in_step(step_of(9))) == (MoeMethod.ALLTOALL, 9)
    assert traffic(pace.in_draft(step_of(2))) == (MoeMethod.MC2, 2)
    assert pace.most_drafts() is None
    pace.idle()
    pace.finish()
    assert not forwards.steps
    assert not forwards.drafts


def test_without_spread_experts_a_step_is_left_as_it_is() -> None:
    pace, step = OwnPace(), step_of(3)
    pace.begin(plan_of(3, None))
    assert pace.in_step(step) is pace.in_draft(step) is step
    assert pace.most_drafts() is None
    pace.idle()
    pace.finish()


def test_drafts_stay_within_what_the_tick_has_room_for() -> None:
    pace = Forwards().make()
    entries, counts = np.array([5, 1, 3]), np.array([4, 4, 1])
    same = limit_drafts(entries, counts, pace)
    assert same[0] is entries
    pace.begin(plan_of(3))
    kept, clipped = limit_drafts(entries, counts, pace)
    assert (kept.tolist(), clipped.tolist()) == ([5, 1], [3, 3])
