"""What to change so that a deployment fits, and what would give it more room.

Every suggestion is another deployment that was sized like the first; what is said of it is what
came out. Nothing is suggested that was not found to help.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from services.worker.sizing import changes
from services.worker.sizing.changes import Change
from services.worker.sizing.deployment import Deployment
from services.worker.sizing.hardware import GIB
from services.worker.sizing.moe_traffic import mc2_shortage_mib
from services.worker.sizing.plan import Plan, make_plan
from shared.errors import CheckpointError, ConfigError

_MIN_GAIN: Final = 1.05
_MAX_GAINS: Final = 4
_MIN_LENGTH: Final = 1024
_MIN_FREED: Final = GIB // 10

_Axis = Callable[[Deployment], Iterator[Change]]
_ALONE: Final[tuple[_Axis, ...]] = (
    changes.settings,
    changes.caches,
    changes.contexts,
    changes.layouts,
    changes.weights,
    changes.nodes,
)
# In the order in which they are given up: the first that is found to fit changes the least.
_TOGETHER: Final[tuple[_Axis, ...]] = (
    changes.nodes,
    changes.weights,
    changes.contexts,
    changes.caches,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """One or more changes and the plan that they give."""

    texts: tuple[str, ...]
    plan: Plan
    effect: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Suggestions for a plan."""

    faster: tuple[Suggestion, ...] = ()
    """With it all decode steps take the fused exchange between experts, whatever fits."""
    enough: tuple[Suggestion, ...] = ()
    """Any one of them makes it fit."""
    together: Suggestion | None = None
    """Several changes that make it fit, where no single one but a lower limit does."""
    gains: tuple[Suggestion, ...] = ()
    """Each gives more tokens, but not enough where the plan does not fit."""


def advise(plan: Plan) -> Advice:
    """Find what helps."""
    faster = tuple(_wider_window(plan))
    tried = [_try_all(plan, axis) for axis in _ALONE]
    enough = [found for axis in tried for found in _lightest(axis)]
    gains = [
        found
        for axis in tried
        for _, found in axis
        if found.plan.num_tokens > _MIN_GAIN * plan.num_tokens and _is_same_size(plan, found.plan)
    ]
    gains.sort(key=lambda found: -found.plan.num_tokens)
    if plan.fits:
        return Advice(faster=faster, gains=tuple(gains[:_MAX_GAINS]))
    return Advice(
        faster=faster,
        enough=(*_limits(plan), *enough),
        together=None if enough else _combined(plan),
        gains=() if enough else tuple(gains[:_MAX_GAINS]),
    )


def _try_all(plan: Plan, axis: _Axis) -> list[tuple[Change, Suggestion]]:
    """Every change of a kind that is possible, with what it gives."""
    return [
        (change, _suggestion(plan, (change.text,), changed))
        for change in axis(plan.deployment)
        if (changed := _sized(change.deployment)) is not None
    ]


def _lightest(tried: list[tuple[Change, Suggestion]]) -> list[Suggestion]:
    """Those of one kind that fit and go no further than needed."""
    fitting = [(change.degree, found) for change, found in tried if found.plan.fits]
    least = min((degree for degree, _ in fitting), default=0)
    return [found for degree, found in fitting if degree == least]


def _sized(deployment: Deployment) -> Plan | None:
    """The plan of a changed deployment; None where it cannot be."""
    try:
        return make_plan(deployment)
    except (ConfigError, CheckpointError):
        return None


def _is_same_size(plan: Plan, other: Plan) -> bool:
    """Whether both take the same devices."""
    return plan.deployment.topology.world_size == other.deployment.topology.world_size


def _combined(plan: Plan) -> Suggestion | None:
    """Changes that fit together: first those on the same devices, then more and more of them."""
    for texts, deployment in _products(plan.deployment, _TOGETHER):
        changed = _sized(deployment) if len(texts) > 1 else None
        if changed is not None and changed.fits:
            return _suggestion(plan, texts, changed)
    return None


def _products(
    deployment: Deployment, axes: Iterable[_Axis]
) -> Iterator[tuple[tuple[str, ...], Deployment]]:
    """All combinations with at most one change of each axis; the last axis varies fastest."""
    first, *rest = axes
    unchanged = Change(text="", deployment=deployment)
    for change in itertools.chain((unchanged,), first(deployment)):
        own = (change.text,) if change.text else ()
        if not rest:
            yield own, change.deployment
            continue
        for texts, changed in _products(change.deployment, rest):
            yield (*own, *texts), changed


def _wider_window(plan: Plan) -> Iterator[Suggestion]:
    """A buffer that the fused exchange between experts has room in."""
    needed = mc2_shortage_mib(plan.deployment)
    changed = _sized(replace(plan.deployment, hccl_mib=needed)) if needed else None
    if changed is not None:
        yield _suggestion(plan, (f"HCCL_BUFFSIZE={needed}",), changed)


def _limits(plan: Plan) -> Iterator[Suggestion]:
    """Limits under which it fits: fewer or shorter sequences, or a larger budget set by hand."""
    yield from _fewer_seqs(plan)
    yield from _larger_budget(plan)
    shorter = _shorter(plan)
    if shorter is not None:
        length = shorter.deployment.max_model_len
        yield _suggestion(plan, (f"--max-model-len {length}",), shorter)


def _larger_budget(plan: Plan) -> Iterator[Suggestion]:
    """The budget that would do, where it is a setting."""
    if plan.deployment.kv_cache_bytes is None:
        return
    blocks = plan.deployment.num_full_seqs * plan.blocks_per_seq + 1
    size = max(blocks * rank.cache.per_block for rank in plan.ranks)
    changed = _sized(replace(plan.deployment, kv_cache_bytes=size))
    if changed is not None and changed.fits:
        yield _suggestion(plan, (f"--kv-cache-memory-bytes {size}",), changed)


def _shorter(plan: Plan) -> Plan | None:
    """The longest limit of length found under which all sequences fit."""
    best, found = None, plan
    # A lower limit may leave more blocks, which allow a higher one; two rounds find nearly all.
    for _ in range(3):
        deployment = found.deployment
        blocks = max(0, found.num_blocks - 1) // deployment.num_full_seqs
        length = blocks * found.ranks[0].cache.tokens_per_block
        if not _MIN_LENGTH <= length < plan.deployment.max_model_len:
            break
        changed = _sized(replace(deployment, max_model_len=length))
        if changed is None or not changed.fits:
            break
        best = found = changed
    return best


def _fewer_seqs(plan: Plan) -> Iterator[Suggestion]:
    deployment = plan.deployment
    is_all = deployment.num_full_seqs == deployment.max_num_seqs
    best: tuple[int, Plan] | None = None
    for count in range(max(1, plan.num_full_seqs), deployment.num_full_seqs):
        fewer = replace(deployment, num_full_seqs=count)
        changed = _sized(replace(fewer, max_num_seqs=count) if is_all else fewer)
        if changed is None or not changed.fits:
            break
        best = count, changed
    if best is not None:
        flag = "--max-num-seqs" if is_all else "--at-least"
        yield _suggestion(plan, (f"{flag} {best[0]}",), best[1])


def _suggestion(before: Plan, texts: tuple[str, ...], after: Plan) -> Suggestion:
    return Suggestion(texts=texts, plan=after, effect=_effect(before, after))


def _effect(before: Plan, after: Plan) -> str:
    """What came out, in numbers."""
    said = []
    freed = min(rank.used for rank in before.ranks) - min(rank.used for rank in after.ranks)
    if freed >= _MIN_FREED:
        said.append(f"frees {freed / GIB:.1f} GiB a device")
    if after.num_tokens:
        factor = f"{after.num_tokens / before.num_tokens:.2f}" if before.num_tokens else "1.00"
        times = f" ({factor}x)" if factor != "1.00" else ""
        said.append(f"{after.num_tokens:,} tokens{times}")
    count, length = after.num_full_seqs, after.deployment.max_model_len
    noun = "sequence" if count == 1 else "sequences"
    said.append(f"{count} {noun} of {length:,}")
    return ", ".join(said)
