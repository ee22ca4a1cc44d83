"""A plan as people read it: one table, the verdict, and what to change."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from services.worker.sizing.advice import Advice, Suggestion
from services.worker.sizing.changes import num_nodes
from services.worker.sizing.deployment import Deployment
from services.worker.sizing.hardware import GIB, MIB
from services.worker.sizing.plan import Item, Plan, RankPlan, Verdict
from services.worker.sizing.weights import WeightClass

_STYLES: Final = {
    Verdict.FITS: "bold green",
    Verdict.STARTS: "bold yellow",
    Verdict.TOO_SMALL: "bold red",
    Verdict.TOO_HEAVY: "bold red",
}
_ESTIMATE: Final = "~"
_MAX_COLUMNS: Final = 6
_Row = tuple[str, list[str], str]


def show(plan: Plan, advice: Advice, console: Console) -> None:
    """Print the table, the verdict and what to change."""
    console.print(f"[bold]{escape(_title(plan.deployment))}[/bold]")
    scale = _Scale.of(plan)
    table_plan = replace(plan, ranks=_tightest(plan.ranks))
    table = Table(show_edge=False, pad_edge=False, box=None, header_style="bold")
    table.add_column("")
    for rank in table_plan.ranks:
        table.add_column(f"{rank.name} (x{rank.count})", justify="right")
    table.add_column("", style="dim")
    for name, cells, note in _rows(table_plan, scale):
        table.add_row(escape(name), *cells, escape(note))
    console.print(table)
    left_out = len(plan.ranks) - len(table_plan.ranks)
    if left_out:
        console.print(f"[dim]{left_out} more kinds of ranks, with more room than these[/dim]")
    console.print()
    console.print(f"[{_STYLES[plan.verdict]}]{escape(verdict_text(plan))}[/]")
    for warning in plan.warnings:
        console.print(f"[yellow]note:[/yellow] {escape(warning)}")
    for heading, suggestions in _headed(plan, advice):
        console.print(heading)
        for suggestion in suggestions:
            changed = " + ".join(suggestion.texts)
            console.print(f"  {escape(changed)}: {escape(suggestion.effect)}")
    note = f"{scale.unit}; {_ESTIMATE} marks estimates, docs/sizing.md tells their sources"
    console.print(f"[dim]{note}[/dim]")


def _tightest(ranks: tuple[RankPlan, ...]) -> tuple[RankPlan, ...]:
    """Those with the least room, in their order, as many as a table can show."""
    kept = sorted(ranks, key=lambda rank: rank.budget)[:_MAX_COLUMNS]
    return tuple(rank for rank in ranks if rank in kept)


def verdict_text(plan: Plan) -> str:
    """The verdict as one sentence."""
    deployment = plan.deployment
    asked, length = deployment.num_full_seqs, deployment.max_model_len
    count = plan.num_full_seqs
    if plan.verdict is Verdict.FITS:
        return f"fits: {_sequences(count, length)} at once, {asked:,} asked for"
    if plan.verdict is Verdict.STARTS:
        return f"starts, but holds {_sequences(count, length)} at once; {asked:,} are asked for"
    if plan.verdict is Verdict.TOO_SMALL:
        needed = plan.blocks_per_seq + 1
        return (
            f"does not start: one sequence of {length:,} tokens takes {needed:,} blocks, "
            f"{plan.num_blocks:,} fit"
        )
    short = -min(rank.budget for rank in plan.ranks)
    return f"does not start: {short / GIB:.2f} GiB a device too much before the first block"


def _title(deployment: Deployment) -> str:
    topology, hardware = deployment.topology, deployment.hardware
    nodes = num_nodes(topology.world_size, hardware.devices_per_node)
    where = hardware.title
    if hardware.is_npu:
        plural = "" if nodes == 1 else "s"
        where = f"{topology.world_size} x {where}, {nodes} node{plural}"
    caches = ", ".join(
        f"{name} {'int8' if is_packed else 'plain'}"
        for name, is_packed in (
            ("latent", deployment.cache.sparse_sfa_c8),
            ("indexer keys", deployment.cache.sparse_li_c8),
        )
    )
    drafts = f", {deployment.num_speculative_tokens} drafts" if deployment.has_mtp else ""
    layout = f"{topology}{', DSA-CP' if deployment.is_dsa_cp else ''}"
    return f"{deployment.scheme} weights, {layout}, {where}; {caches}{drafts}"


@dataclass(frozen=True, slots=True)
class _Scale:
    """The unit of a table's sizes."""

    unit: str
    size: int

    @classmethod
    def of(cls, plan: Plan) -> "_Scale":
        """GiB, or MiB for a small model."""
        is_large = max(rank.weights.total for rank in plan.ranks) >= GIB
        return cls("GiB", GIB) if is_large else cls("MiB", MIB)

    def show(self, num_bytes: int) -> str:
        """A size in the unit."""
        return f"{num_bytes / self.size:.2f}"

    def row(self, name: str, sizes: Iterable[int], note: str = "") -> _Row:
        """Sizes of all kinds of ranks."""
        return name, [self.show(size) for size in sizes], note


def _rows(plan: Plan, scale: _Scale) -> Iterator[_Row]:
    yield scale.row("weights", [rank.weights.total for rank in plan.ranks])
    for kind in WeightClass:
        if any(rank.weights[kind] for rank in plan.ranks):
            yield scale.row(f"  {kind}", [rank.weights[kind] for rank in plan.ranks])
    if plan.ranks[0].runtime:
        yield scale.row(
            "beside the weights", [rank.used - rank.weights.total for rank in plan.ranks]
        )
        yield from _runtime_rows(plan, scale)
        total = scale.show(plan.deployment.hardware.memory_bytes)
        note = f"{plan.deployment.utilization} of {total}"
        yield scale.row("device, share to use", [rank.limit or 0 for rank in plan.ranks], note)
    yield scale.row("free for KV blocks", [rank.budget for rank in plan.ranks])
    yield from _cache_rows(plan)


def _cache_rows(plan: Plan) -> Iterator[_Row]:
    caches = [rank.cache for rank in plan.ranks]
    yield _counts("bytes per token", [cache.per_token for cache in caches])
    yield _counts("bytes per block", [cache.per_block for cache in caches])
    yield _counts("blocks", [rank.num_blocks for rank in plan.ranks])
    usable = [max(0, rank.num_blocks - 1) for rank in plan.ranks]
    per_block = caches[0].tokens_per_block
    tokens = [count * per_block for count in usable]
    yield _counts("tokens of a replica", tokens, f"{per_block:,} a block")
    full = [count // plan.blocks_per_seq for count in usable]
    yield _counts("sequences at once", full, f"of {plan.deployment.max_model_len:,} tokens")


def _runtime_rows(plan: Plan, scale: _Scale) -> Iterator[_Row]:
    """Items by name; ranks of other stages may lack one."""
    names = dict.fromkeys(item.name for rank in plan.ranks for item in rank.runtime)
    for name in names:
        found = [_named(rank.runtime, name) for rank in plan.ranks]
        item = next(item for item in found if item is not None)
        mark = _ESTIMATE if item.is_estimate else " "
        cells = ["" if item is None else scale.show(item.num_bytes) for item in found]
        turns = "; ".join(f"{part} {scale.show(size)}" for part, size in item.parts.items())
        yield f"{mark} {name}", cells, item.detail or turns


def _named(items: Iterable[Item], name: str) -> Item | None:
    return next((item for item in items if item.name == name), None)


def _counts(name: str, counts: Iterable[int], note: str = "") -> _Row:
    return name, [f"{count:,}" for count in counts], note


def _sequences(count: int, length: int) -> str:
    return f"{count:,} sequence{'' if count == 1 else 's'} of {length:,} tokens"


def _headed(plan: Plan, advice: Advice) -> Iterator[tuple[str, tuple[Suggestion, ...]]]:
    if advice.faster:
        yield "faster between experts:", advice.faster
    if advice.enough:
        yield "any one of these makes it fit:", advice.enough
    if advice.together:
        yield "these together make it fit:", (advice.together,)
    if advice.gains:
        heading = "more room:" if plan.fits else "these help, but none of them is enough:"
        yield heading, advice.gains
