"""Training resumes exactly where it was saved, and follows its plan."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.nano import train

ROOT = Path(__file__).parents[3]
PLAN: dict[str, Any] = {
    "draft_weight": 1.0,
    "batches": [{"weight": 1, "rows": 2, "length": 96, "mode": "index", "skills": {"echo": 1}}],
}


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> train.Shared:
    monkeypatch.setattr(train, "FOLDER", tmp_path)
    monkeypatch.setattr(train, "CHECKPOINT", ROOT / "models" / "glm-nano")
    return train.make_shared()


def test_saved_state_comes_back_whole(shared: train.Shared) -> None:
    for vector in shared.vectors.values():
        vector.uniform_()
    shared.control[0] = 7
    train.save(shared, train.FOLDER / "state.pt")
    again = train.make_shared()
    assert again.step == 7
    for name in ("weights", "first", "second", "average"):
        assert torch.equal(again.vectors[name], shared.vectors[name])
    head = train.views(again.model, again.vectors["weights"])["lm_head.weight"]
    assert torch.equal(again.model.lm_head.weight, head)


def test_every_loss_of_the_plan_reaches_its_part(shared: train.Shared) -> None:
    encoder = train.Encoder(train.CHECKPOINT)
    mix, mode = train.choose_mix(PLAN, random.Random(0))
    batch = train.make_batch(encoder, random.Random(0), mix)
    found = train.losses(shared.model, batch, PLAN, mode)
    assert set(found) == {"main", "draft", "index"}
    found["draft"].backward()
    moved = {n for n, p in shared.model.named_parameters() if p.grad is not None and p.grad.any()}
    assert "mtp.eh_proj.weight" in moved
    assert not any(name.startswith("layers.") for name in moved)


def test_rate_warms_up_and_decays_as_planned() -> None:
    plan = {"rate": 0.5, "decay": [100, 200]}
    rates = [train.rates_at(plan, step)["trunk"] for step in (0, 99, 150, 1000)]
    assert rates == pytest.approx([0.01, 0.5, 0.25, 0.01])
    assert train.rates_at(plan | {"mtp_rate": 1.0}, 99)["mtp"] == 1.0


@pytest.mark.parametrize("path", sorted((ROOT / "tools/nano/plans").glob("*.json")), ids=str)
def test_shipped_plans_can_be_followed(path: Path) -> None:
    plan = json.loads(path.read_text(encoding="utf-8"))
    for seed in range(20):
        mix, _ = train.choose_mix(plan, random.Random(seed))
        assert mix.rows * mix.length >= 512
