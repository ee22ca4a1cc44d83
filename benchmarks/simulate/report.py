"""The numbers of a run: rates, percentiles, hits, preemptions, fairness."""

from collections import defaultdict
from collections.abc import Sequence

from benchmarks.simulate.world import Outcome, Served


def summarize(outcome: Outcome, offered_s: float, num_replicas: int) -> dict[str, object]:
    """What a run comes to.

    Args:
        outcome: The run.
        offered_s: How long requests came.
        num_replicas: Devices that were there.
    """
    served = outcome.served
    done = [s for s in served if s.ended_at is not None and s.first_token_at is not None]
    ttft = [s.first_token_at - s.arrived_at for s in done if s.first_token_at is not None]
    tpot = [_tpot(s) for s in done if s.num_output_tokens > 1]
    seconds = max(outcome.ended_at, 1e-9)
    load = outcome.load
    lookups = max(1, load.num_prefix_cache_queries_total)
    return {
        "requests": len(served),
        "done": len(done),
        "refused": sum(s.is_refused for s in served),
        "requests_per_s": round(len(done) / seconds, 2),
        "output_tokens_per_s": round(sum(s.num_output_tokens for s in done) / seconds, 1),
        "prompt_tokens_per_s": round(sum(s.num_prompt_tokens for s in done) / seconds, 1),
        "ttft_ms": percentiles(ttft),
        "tpot_ms": percentiles(tpot),
        "gap_ms": weighted_percentiles(outcome.gaps),
        "hit_rate": round(load.num_prefix_cache_hits_total / lookups, 4),
        "preemptions": load.num_preemptions_total,
        "recomputed_tokens": load.num_recomputed_tokens_total,
        "jain": round(fairness(served, offered_s), 4),
        "ended_at_s": round(outcome.ended_at, 1),
        "device_busy": round(outcome.device_s / seconds / num_replicas, 3),
        "scheduler_busy": round(outcome.scheduler_s / seconds, 3),
        "scheduler_us_per_step": round(1e6 * outcome.scheduler_s / max(1, outcome.num_steps), 1),
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds below which 50, 90 and 99 of a hundred are."""
    return weighted_percentiles([(value, 1) for value in seconds])


def weighted_percentiles(values: Sequence[tuple[float, int]]) -> dict[str, float]:
    """The same for values that count several times."""
    ordered = sorted(values)
    total = sum(weight for _, weight in ordered)
    found: dict[str, float] = {}
    for share in (50, 90, 99):
        reached, value = 0, 0.0
        for seconds, weight in ordered:
            reached, value = reached + weight, seconds
            if reached * 100 >= share * total:
                break
        found[f"p{share}"] = round(1000 * value, 2)
    return found


def fairness(served: Sequence[Served], until_s: float) -> float:
    """Jain's index over tenants of what each got by its due: 1 is fair, 1/n is one for all.

    The due is the max-min share of all tokens that were delivered: who asks for less than an equal
    share is due what it asks for, the rest is shared among the others.
    """
    asked: dict[str, float] = defaultdict(float)
    got: dict[str, float] = defaultdict(float)
    for one in served:
        size = one.num_prompt_tokens + (one.num_output_tokens or 200)
        asked[one.tenant_id] += size
        if one.ended_at is not None and one.ended_at <= until_s:
            got[one.tenant_id] += size
    due = max_min(dict(asked), sum(got.values()))
    shares = [got[tenant] / due[tenant] for tenant in asked if due[tenant] > 0]
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def max_min(asked: dict[str, float], total: float) -> dict[str, float]:
    """Shares of `total`, the smallest demands first; nobody gets more than it asks for."""
    due: dict[str, float] = {}
    left, names = total, sorted(asked, key=asked.__getitem__)
    for place, name in enumerate(names):
        due[name] = min(asked[name], left / (len(names) - place))
        left -= due[name]
    return due


def _tpot(served: Served) -> float:
    assert served.ended_at is not None
    assert served.first_token_at is not None
    return (served.ended_at - served.first_token_at) / (served.num_output_tokens - 1)
