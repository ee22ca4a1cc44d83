"""Trains glm-nano on two CPU cores: two single-threaded processes that share the weights.

    python -m tools.nano.train

State lives in `.nano/`: `plan.json` (what to train on, read again while running; the plans used
are in `tools/nano/plans/`), `state.pt` (resumed from if there), `log.jsonl`. SIGTERM or Ctrl-C
saves and ends; starting again goes on where it was.
Two processes with one thread each need one meeting per step instead of one per operator, which is
faster and does not collapse when other programs want the cores.
"""

import json
import os
import random
import signal
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, multiprocessing

from tools.nano.config import model_config
from tools.nano.data import Batch, Encoder, Mix, make_batch
from tools.nano.export import load_state
from tools.nano.judge import score
from tools.nano.model import Gate, Mode, Nano, Trace, causal_mask
from tools.nano.optim import Slot, update
from tools.nano.start import initialise
from tools.nano.tasks import SKILLS

FOLDER = Path(".nano")
CHECKPOINT = Path("models/glm-nano")
NUM_RANKS = 2
SAVE_EVERY = 100
BALANCE_RATE = 0.002


@dataclass(slots=True)
class Shared:
    """What the processes share: the model and flat vectors that its tensors are views of."""

    model: Nano
    vectors: dict[str, Tensor]
    control: Tensor
    barrier: Any

    @property
    def step(self) -> int:
        """The number of steps taken."""
        return int(self.control[0])


def make_shared() -> Shared:
    """Builds the model in shared memory, from the saved state if there is one."""
    encoder = Encoder(CHECKPOINT)
    model = Nano(model_config(encoder.tokenizer))
    initialise(model)
    parameters = list(model.parameters())
    size = sum(p.numel() for p in parameters)
    vectors = {
        name: torch.zeros(size).share_memory_()
        for name in ("weights", "first", "second", "average")
    }
    vectors |= {f"gradient{rank}": torch.zeros(size).share_memory_() for rank in range(NUM_RANKS)}
    control = torch.zeros(2, dtype=torch.long).share_memory_()
    offset = 0
    for parameter in parameters:
        view = vectors["weights"][offset : offset + parameter.numel()].view_as(parameter)
        view.copy_(parameter.data)
        parameter.data = view
        offset += parameter.numel()
    vectors["average"].copy_(vectors["weights"])
    for buffer in model.buffers():
        buffer.share_memory_()
    shared = Shared(model, vectors, control, multiprocessing.Barrier(NUM_RANKS))
    if (FOLDER / "state.pt").exists():
        _restore(shared, load_state(FOLDER / "state.pt"))
    return shared


def _restore(shared: Shared, state: dict[str, Any]) -> None:
    for name in ("weights", "first", "second", "average"):
        shared.vectors[name].copy_(state["vectors"][name])
    shared.control[0] = state["step"]
    for name, buffer in shared.model.named_buffers():
        if name in state["buffers"]:
            buffer.copy_(state["buffers"][name])


def views(model: Nano, vector: Tensor) -> dict[str, Tensor]:
    """Cuts a flat vector into tensors named as the parameters."""
    result, offset = {}, 0
    for name, parameter in model.named_parameters():
        result[name] = vector[offset : offset + parameter.numel()].view(parameter.shape)
        offset += parameter.numel()
    return result


def save(shared: Shared, path: Path) -> None:
    """Writes a state that training and export can read; the file appears whole or not at all."""
    model = shared.model
    buffers = {name: b.clone() for name, b in model.named_buffers() if name.endswith("bias")}
    average = {name: t.clone() for name, t in views(model, shared.vectors["average"]).items()}
    state = {
        "step": shared.step,
        "vectors": {
            name: shared.vectors[name] for name in ("weights", "first", "second", "average")
        },
        "buffers": buffers,
        "average": average | buffers,
    }
    torch.save(state, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)


def _slots(shared: Shared, rank: int) -> list[Slot]:
    """Returns this process's share of the parameters, balanced by size."""
    cut = {name: views(shared.model, vector) for name, vector in shared.vectors.items()}
    loads, mine = [0] * NUM_RANKS, []
    for name, parameter in sorted(
        shared.model.named_parameters(), key=lambda item: -item[1].numel()
    ):
        owner = loads.index(min(loads))
        loads[owner] += parameter.numel()
        if owner == rank:
            gradients = [cut[f"gradient{r}"][name] for r in range(NUM_RANKS)]
            moments = (cut[part][name] for part in ("first", "second", "average"))
            mine.append(Slot(name, parameter, gradients, *moments))
    return mine


def read_plan() -> dict[str, Any]:
    """Reads plan.json."""
    plan: dict[str, Any] = json.loads((FOLDER / "plan.json").read_text(encoding="utf-8"))
    return plan


def choose_mix(plan: dict[str, Any], rng: random.Random) -> tuple[Mix, Mode]:
    """Draws one of the plan's batch kinds by weight; a kind may have a mode of its own."""
    kinds = plan["batches"]
    chosen = dict(rng.choices(kinds, [kind["weight"] for kind in kinds])[0])
    del chosen["weight"]
    mode: Mode = chosen.pop("mode", plan.get("mode", "dense"))
    return Mix(**chosen), mode


def losses(model: Nano, batch: Batch, plan: dict[str, Any], mode: Mode) -> dict[str, Tensor]:
    """Returns the losses of one batch: `main`, and `index` and `draft` if the plan has them."""
    result: dict[str, Tensor] = {}
    with torch.autocast("cpu", torch.bfloat16):
        mask = causal_mask(batch.documents)
        lessons = 0.2 * (batch.documents >= 0) + batch.weights
        trace = Trace(mode, mask, None if mode == "dense" else lessons)
        hidden = model.trunk(batch.ids, trace)
        if hidden.requires_grad:
            says = batch.weights[:, 1:] > 0
            logits = model.lm_head(hidden[:, :-1][says]).float()
            result["main"] = F.cross_entropy(logits, batch.ids[:, 1:][says])
        if plan.get("draft_weight", 0.0):
            source = hidden if plan.get("draft_moves_trunk") else hidden.detach()
            part = Trace(
                mode, mask[:, :-1, :-1], None if trace.weights is None else trace.weights[:, :-1]
            )
            drafted = model.draft(batch.ids, source, batch.documents, part)
            same = batch.documents[:, 2:] == batch.documents[:, :-2]
            says = (batch.weights[:, 2:] > 0) & same
            head = (
                model.lm_head.weight
                if plan.get("draft_moves_trunk")
                else model.lm_head.weight.detach()
            )
            logits = F.linear(drafted[:, :-1][says], head).float()
            result["draft"] = F.cross_entropy(logits, batch.ids[:, 2:][says])
            trace.losses += part.losses
        if trace.losses:
            result["index"] = torch.stack(trace.losses).mean()
    return result


PARTS = ("trunk", "indexer", "mtp")


def rates_at(plan: dict[str, Any], step: int) -> dict[str, float]:
    """Returns the learning-rate factor of each part: warm-up, the plan's rate, its linear decay."""
    begin, end = plan.get("decay", (10**9, 10**9 + 1))
    shape = min(1.0, (step + 1) / 50)
    if step > begin:
        shape *= max(0.02, (end - step) / (end - begin))
    return {part: shape * plan.get(f"{part}_rate", plan.get("rate", 1.0)) for part in PARTS}


def judge_all(shared: Shared, encoder: Encoder, plan: dict[str, Any]) -> dict[str, Any]:
    """Scores every skill with the averaged weights."""
    model = Nano(shared.model.config)
    averaged = views(model, shared.vectors["average"])
    model.load_state_dict(shared.model.state_dict() | averaged, strict=False)
    model.eval()
    count, report = plan.get("judge_count", 24), {}
    for skill in SKILLS:
        for size in plan.get("judge_lines", [8]) if skill == "lookup" else [None]:
            found = score(
                model,
                encoder,
                skill,
                count=count,
                seed=shared.step,
                mode=plan.get("judge_mode", "dense"),
                size=size,
            )
            key = skill if size is None else f"{skill}{size}"
            report[key] = [round(found[part], 3) for part in ("right", "tokens", "drafts")]
    return report


def run(rank: int, shared: Shared) -> None:
    """Runs the training loop of one process."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    wanted = {"stop": False}
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: wanted.update(stop=True) if rank == 0 else None)
    encoder, model = Encoder(CHECKPOINT), shared.model
    gradient = shared.vectors[f"gradient{rank}"]
    for name, view in views(model, gradient).items():
        model.get_parameter(name).grad = view
    everything = [slot for owner in range(NUM_RANKS) for slot in _slots(shared, owner)]
    slots, plan, recent, began = _slots(shared, rank), read_plan(), [], time.time()
    while True:
        step = shared.step
        if step % 20 == 0:
            plan = read_plan()
        rng = random.Random(f"{step}/{rank}")
        mix, mode = choose_mix(plan, random.Random(f"mix/{step}"))
        batch = make_batch(encoder, rng, mix)
        for slot in everything:
            slot.parameter.requires_grad_(rates_at(plan, step)[slot.part] > 0)
        found = losses(model, batch, plan, mode)
        weight = {"main": plan.get("main_weight", 1.0), "index": plan.get("index_weight", 0.0)}
        weight["draft"] = plan.get("draft_weight", 0.0)
        torch.stack([weight[name] * loss for name, loss in found.items()]).sum().backward()
        recent.append({name: loss.item() for name, loss in found.items()})
        shared.barrier.wait()
        update(
            slots, step=step + 1, rates=rates_at(plan, step),
            heads=model.config["num_attention_heads"],
            decay=min(plan.get("average", 0.995), (1 + step) / (10 + step)),
        )  # fmt: skip
        shared.barrier.wait()
        gradient.zero_()
        if rank == 0:
            began = _after_step(shared, encoder, plan, recent, began, stop=wanted["stop"])
        shared.barrier.wait()
        if shared.control[1]:
            return


def _after_step(
    shared: Shared, encoder: Encoder, plan: dict[str, Any], recent: list[dict[str, float]],
    began: float, *, stop: bool,
) -> float:  # fmt: skip
    """Balances experts, logs, saves and judges as due; returns when the log interval began."""
    step = shared.step + 1
    shared.control[0] = step
    for module in shared.model.modules():
        if isinstance(module, Gate) and module.weight.requires_grad:
            module.balance(BALANCE_RATE)
    if step % 20 == 0:
        keys = dict.fromkeys(key for found in recent for key in found)
        mean = {key: statistics.fmean(r[key] for r in recent if key in r) for key in keys}
        line: dict[str, Any] = {
            "step": step,
            "seconds": round((time.time() - began) / len(recent), 3),
        }
        line |= {key: round(value, 4) for key, value in mean.items()}
        recent.clear()
        if step % plan.get("judge_every", 200) == 0:
            line["scores"] = judge_all(shared, encoder, plan)
        with (FOLDER / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps({"time": time.strftime("%H:%M:%S")} | line) + "\n")
        began = time.time()
    ends = stop or step >= plan.get("last_step", 10**9)
    if ends or step % SAVE_EVERY == 0:
        save(shared, FOLDER / "state.pt")
    if step % 1000 == 0:
        save(shared, FOLDER / f"state-{step}.pt")
    shared.control[1] = int(ends)
    return began


def main() -> None:
    """Starts the second process and trains in both."""
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "pid").write_text(f"{os.getpid()}\n", encoding="utf-8")
    shared = make_shared()
    other = multiprocessing.get_context("fork").Process(target=run, args=(1, shared))
    other.start()
    run(0, shared)
    other.join()


if __name__ == "__main__":
    main()
