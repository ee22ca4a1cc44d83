"""Four pictures of a run: waiting for the first token, time per token, rates, the queue."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.simulate.world import Outcome


def draw(outcomes: dict[str, Outcome], path: Path) -> None:
    """Draw named runs into one file; its suffix (svg, png) is the format."""
    # Slow to import, and only needed here.
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, ((first, each), (rate, queue)) = plt.subplots(2, 2, figsize=(11, 7))
    for name, outcome in outcomes.items():
        done = [s for s in outcome.served if s.first_token_at is not None]
        first.plot(*_shares([s.first_token_at - s.arrived_at for s in done if s.first_token_at]),
                   label=name)  # fmt: skip
        each.plot(*_shares([gap * 1000 for gap, _ in outcome.gaps]), label=name)
        times = [sample.at for sample in outcome.samples]
        rate.plot(times[10:], _rates(outcome), label=name)
        queue.plot(times, [sample.num_waiting for sample in outcome.samples], label=name)
    for axes, title, unit, log in (
        (first, "time to first token", "seconds", True),
        (each, "time between tokens", "milliseconds", True),
        (rate, "output tokens per second", "seconds", False),
        (queue, "sequences that wait", "seconds", False),
    ):
        axes.set_title(title)
        axes.set_xlabel(unit)
        axes.grid(visible=True, alpha=0.3)
        if log:
            axes.set_xscale("log")
            axes.set_ylabel("share of all")
    first.legend()
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _shares(values: Sequence[float]) -> tuple[list[float], list[float]]:
    ordered = sorted(values)
    return ordered, [(place + 1) / len(ordered) for place in range(len(ordered))]


def _rates(outcome: Outcome) -> list[float]:
    """Tokens of the last second, at each sample from the tenth on."""
    counts = [sample.num_output_tokens for sample in outcome.samples]
    return [float(now - then) for then, now in zip(counts, counts[10:], strict=False)]
