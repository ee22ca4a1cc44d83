"""Conflicts of replicas, and of the fronts before them."""

from typing import Final

from services.launcher.options.deployment import Deployment
from services.launcher.options.rules import Conflict, Outcome

_DP = "data_parallel_size"
_LOCAL = "data_parallel_size_local"
_START = "data_parallel_start_rank"
_RANK = "data_parallel_rank"


def _leaves_the_replicas(asked: Deployment) -> bool:
    flags = asked.flags
    start, local = flags.data_parallel_start_rank, flags.data_parallel_size_local
    return start is not None and start + (1 if local is None else local) > flags.data_parallel_size


def _is_one_of_many(asked: Deployment) -> bool:
    rank = asked.flags.data_parallel_rank
    return rank is not None and rank < asked.flags.data_parallel_size


REPLICAS: Final = (
    Conflict(
        key="rank-size",
        names=(_RANK, _DP),
        holds=lambda asked: (
            asked.flags.data_parallel_rank is not None
            and asked.flags.data_parallel_rank >= asked.flags.data_parallel_size
        ),
        outcome=Outcome.REFUSE,
        text="replicas are numbered from 0",
        source="vLLM config/parallel.py",
    ),
    Conflict(
        key="local-size",
        names=(_LOCAL, _DP),
        holds=lambda asked: (
            (asked.flags.data_parallel_size_local or 0) > asked.flags.data_parallel_size
        ),
        outcome=Outcome.REFUSE,
        text="a machine holds no more replicas than there are",
        source="vLLM config/parallel.py",
    ),
    Conflict(
        key="start-size",
        names=(_START, _LOCAL, _DP),
        holds=_leaves_the_replicas,
        outcome=Outcome.REFUSE,
        text="the replicas of this machine reach past the last one",
        source="vLLM engine/arg_utils.py",
    ),
    Conflict(
        key="rank-local",
        names=(_RANK, _LOCAL),
        holds=lambda asked: (
            asked.flags.data_parallel_rank is not None
            and asked.flags.data_parallel_size_local not in {None, 1}
        ),
        outcome=Outcome.REFUSE,
        text="a process that is one replica holds one",
        source="vLLM engine/arg_utils.py",
    ),
    Conflict(
        key="rank-start",
        names=(_RANK, _START),
        holds=lambda asked: (
            asked.flags.data_parallel_rank is not None
            and asked.flags.data_parallel_start_rank is not None
        ),
        outcome=Outcome.REFUSE,
        text="a process is one replica or starts at one",
        source="vLLM engine/arg_utils.py",
    ),
    Conflict(
        key="rank-hybrid",
        names=(_RANK, "data_parallel_hybrid_lb"),
        holds=lambda asked: (
            asked.flags.data_parallel_rank is not None and asked.flags.data_parallel_hybrid_lb
        ),
        outcome=Outcome.REFUSE,
        text="a replica has a front of its own, or shares its machine's",
        source="vLLM engine/arg_utils.py",
    ),
    Conflict(
        key="hybrid-external",
        names=("data_parallel_hybrid_lb", "data_parallel_external_lb"),
        holds=lambda asked: (
            asked.flags.data_parallel_hybrid_lb and asked.flags.data_parallel_external_lb
        ),
        outcome=Outcome.REFUSE,
        text="a replica has a front of its own, or shares its machine's",
        source="vLLM engine/arg_utils.py",
    ),
    Conflict(
        key="hybrid-local",
        names=("data_parallel_hybrid_lb", _LOCAL),
        holds=lambda asked: (
            asked.flags.data_parallel_hybrid_lb and asked.flags.data_parallel_size_local is None
        ),
        outcome=Outcome.REFUSE,
        text="a machine's front needs to know how many replicas stand behind it",
        source="vLLM engine/arg_utils.py",
    ),
    Conflict(
        key="hybrid-one",
        names=("data_parallel_hybrid_lb", _LOCAL),
        holds=lambda asked: (
            asked.flags.data_parallel_hybrid_lb and asked.flags.data_parallel_size_local == 1
        ),
        outcome=Outcome.SWITCH_OFF,
        text="the one replica of a machine has a front of its own",
        source="vLLM engine/arg_utils.py",
    ),
    Conflict(
        key="hybrid-all",
        names=("data_parallel_hybrid_lb", _LOCAL, _DP),
        holds=lambda asked: (
            asked.flags.data_parallel_hybrid_lb
            and asked.flags.data_parallel_size_local == asked.flags.data_parallel_size
        ),
        outcome=Outcome.SWITCH_OFF,
        text="one machine has all replicas, so its front is the only one",
        source="vLLM engine/arg_utils.py",
    ),
    Conflict(
        key="headless-hybrid",
        names=("headless", "data_parallel_hybrid_lb"),
        holds=lambda asked: asked.flags.headless and asked.flags.data_parallel_hybrid_lb,
        outcome=Outcome.REFUSE,
        text="a machine without HTTP has no front",
        source="vLLM entrypoints/cli/serve.py",
    ),
    Conflict(
        key="headless-servers",
        names=("headless", "api_server_count"),
        holds=lambda asked: asked.flags.headless and bool(asked.flags.api_server_count),
        outcome=Outcome.REFUSE,
        text="a machine without HTTP starts no HTTP process",
        source="vLLM entrypoints/cli/serve.py",
    ),
    Conflict(
        key="headless-empty",
        names=("headless", _LOCAL),
        holds=lambda asked: asked.flags.headless and asked.flags.data_parallel_size_local == 0,
        outcome=Outcome.REFUSE,
        text="a machine with neither HTTP nor replicas does nothing",
        source="vLLM entrypoints/cli/serve.py",
    ),
    Conflict(
        key="headless-rank",
        names=("headless", _RANK),
        holds=lambda asked: asked.flags.headless and _is_one_of_many(asked),
        outcome=Outcome.WARN,
        text="requests reach this replica only through the front of replica 0",
        source="GLM-5.2 guide, 5.1.3.1",
    ),
)
