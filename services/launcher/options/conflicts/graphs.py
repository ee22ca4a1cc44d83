"""Conflicts of captured steps and of draft tokens."""

from typing import Final

from services.launcher.options.deployment import Deployment
from services.launcher.options.rules import Conflict, Outcome

_MODE = "compilation_config.cudagraph_mode"
_SIZES = "compilation_config.cudagraph_capture_sizes"
_DRAFTS = "speculative_config.num_speculative_tokens"
_TP = "tensor_parallel_size"
_SEQS = "settings.max_num_seqs"
_TOKENS = "settings.max_num_batched_tokens"
_XLITE = "additional_config.xlite_graph_config.enabled"
_GRAPH = "vllm-ascend platform.py"
# The worker's own, where nothing is said.
_DEFAULT_SEQS: Final = 256
_MTP: Final = frozenset({None, "mtp", "deepseek_mtp"})


def _num_rows(asked: Deployment) -> int:
    """Rows of a sequence in a decode step."""
    return 1 + asked.num_drafts


def _rounded(asked: Deployment) -> set[int]:
    """Capture sizes as they are used: whole sequences."""
    rows = _num_rows(asked)
    return {-(-size // rows) * rows for size in asked.capture_sizes}


def _num_cut(asked: Deployment) -> int:
    """Capture sizes that the ranks of a layer cannot share evenly."""
    if not asked.splits_tokens:
        return 0
    return sum(size % asked.flags.tensor_parallel_size != 0 for size in asked.capture_sizes)


def _rows_leave_ranks(asked: Deployment) -> bool:
    rows, ranks = _num_rows(asked), asked.flags.tensor_parallel_size
    return (
        asked.splits_tokens
        and asked.asks_for_graphs
        and rows > 1
        and rows % ranks != 0
        and ranks % rows != 0
    )


def _most_rows(asked: Deployment) -> int | None:
    seqs = asked.settings.max_num_seqs
    return None if seqs is None else seqs * _num_rows(asked)


def _exceeds(sizes: set[int], bound: int | None) -> bool:
    return bound is not None and any(size > bound for size in sizes)


def _no_size_is_left(asked: Deployment) -> bool:
    sizes, most = _rounded(asked), _most_rows(asked)
    bound = _DEFAULT_SEQS * _num_rows(asked) if most is None else most
    num_tokens = asked.settings.max_num_batched_tokens
    return bool(sizes) and min(sizes) > min(bound, num_tokens or bound)


def _hangs_when_full(asked: Deployment) -> bool:
    most, sizes = _most_rows(asked), _rounded(asked)
    recomputes = asked.flags.additional_config.recompute_scheduler_enable
    return recomputes and most is not None and bool(sizes) and max(sizes) < most


def _is_mtp(asked: Deployment) -> bool:
    drafts = asked.flags.speculative_config
    return drafts is not None and drafts.method in _MTP


CAPTURE: Final = (
    Conflict(
        key="eager-graphs",
        names=(_MODE, "enforce_eager"),
        holds=lambda asked: (
            asked.asks_for_graphs and asked.is_given("enforce_eager") and asked.flags.enforce_eager
        ),
        outcome=Outcome.SWITCH_OFF,
        text="steps are not captured",
        source=_GRAPH,
        becomes="NONE",
    ),
    Conflict(
        key="blocking-graphs",
        names=("environment.ASCEND_LAUNCH_BLOCKING", _MODE),
        holds=lambda asked: asked.asks_for_graphs and asked.environment.ASCEND_LAUNCH_BLOCKING == 1,
        outcome=Outcome.REFUSE,
        text="a captured step does not wait for each operator",
        source=_GRAPH,
    ),
    Conflict(
        key="static-kernel",
        names=(
            "additional_config.ascend_compilation_config.enable_static_kernel",
            "additional_config.ascend_compilation_config.enable_npugraph_ex",
        ),
        holds=lambda asked: (
            asked.flags.additional_config.ascend_compilation_config.enable_static_kernel
            and asked.flags.additional_config.ascend_compilation_config.enable_npugraph_ex is False
        ),
        outcome=Outcome.REFUSE,
        text="static kernels are made by npugraph_ex",
        source="vllm-ascend ascend_config.py",
    ),
    Conflict(
        key="sizes-no-ranks",
        names=(_SIZES, _TP),
        holds=lambda asked: 0 < len(asked.capture_sizes) == _num_cut(asked),
        outcome=Outcome.REFUSE,
        text="the ranks of a layer share a step's tokens; no size is a multiple of their number",
        source=_GRAPH,
    ),
    Conflict(
        key="sizes-some-ranks",
        names=(_SIZES, _TP),
        holds=lambda asked: 0 < _num_cut(asked) < len(asked.capture_sizes),
        outcome=Outcome.WARN,
        text="sizes that are no multiple of the ranks are left out",
        source=_GRAPH,
    ),
    Conflict(
        key="sizes-rows",
        names=(_SIZES, _DRAFTS),
        holds=lambda asked: any(size % _num_rows(asked) for size in asked.capture_sizes),
        outcome=Outcome.WARN,
        text="sizes that are no multiple of 1 + drafts are rounded up to the next",
        source="vLLM config/vllm.py",
    ),
    Conflict(
        key="sizes-seqs",
        names=(_SIZES, _SEQS),
        holds=lambda asked: _exceeds(_rounded(asked), _most_rows(asked)),
        outcome=Outcome.WARN,
        text="sizes beyond 1 + drafts of every sequence are never used",
        source="vllm-ascend compilation/acl_graph.py",
    ),
    Conflict(
        key="sizes-none",
        names=(_SIZES, _SEQS, _TOKENS),
        holds=_no_size_is_left,
        outcome=Outcome.REFUSE,
        text="every size is beyond 1 + drafts of all sequences, or the tokens of a step: no step "
        "would be captured",
        source="own",
    ),
    Conflict(
        key="sizes-tokens",
        names=(_SIZES, _TOKENS),
        holds=lambda asked: _exceeds(_rounded(asked), asked.settings.max_num_batched_tokens),
        outcome=Outcome.WARN,
        text="sizes beyond the tokens of a step are left out",
        source="vLLM config/vllm.py",
    ),
    Conflict(
        key="sizes-recompute",
        names=("additional_config.recompute_scheduler_enable", _SIZES, _SEQS),
        holds=_hangs_when_full,
        outcome=Outcome.WARN,
        text="vllm-ascend was seen to hang when the largest size is below 1 + drafts of every "
        "sequence",
        source="vllm-ascend issue 8240",
    ),
    Conflict(
        key="rows-ranks",
        names=(_DRAFTS, _TP, _MODE),
        holds=_rows_leave_ranks,
        outcome=Outcome.WARN,
        text="1 + drafts and the ranks of a layer do not divide each other, so rounded sizes are "
        "no multiples of both",
        source="vLLM config/vllm.py",
    ),
)

DRAFTS: Final = (
    Conflict(
        key="drafts-rows",
        names=(_DRAFTS, "model.index_topk"),
        holds=lambda asked: asked.is_sparse and _num_rows(asked) > 16,
        outcome=Outcome.REFUSE,
        text="sparse attention takes at most 16 rows of a sequence in a decode step, 1 + drafts",
        source="vllm-ascend attention/sfa_v1.py",
    ),
    Conflict(
        key="drafts-layer",
        names=("speculative_config.method", "model.num_nextn_predict_layers"),
        holds=lambda asked: (
            _is_mtp(asked) and asked.model.is_known and not asked.model.num_nextn_predict_layers
        ),
        outcome=Outcome.REFUSE,
        text="the checkpoint has no MTP layer",
        source="vLLM config/speculative.py",
    ),
    Conflict(
        key="drafts-multiple",
        names=(_DRAFTS, "model.num_nextn_predict_layers"),
        holds=lambda asked: (
            _is_mtp(asked)
            and asked.num_drafts > (asked.model.num_nextn_predict_layers or asked.num_drafts)
            and asked.num_drafts % (asked.model.num_nextn_predict_layers or 1) != 0
        ),
        outcome=Outcome.REFUSE,
        text="MTP layers are run whole rounds, so their number must divide the drafts",
        source="vLLM config/speculative.py",
    ),
    Conflict(
        key="drafts-captured",
        names=("speculative_config.enforce_eager", "model.index_topk"),
        holds=lambda asked: (
            asked.is_sparse
            and asked.is_given("speculative_config.enforce_eager")
            and asked.value("speculative_config.enforce_eager") is False
        ),
        outcome=Outcome.WARN,
        text="drafts of this model are never captured",
        source="vllm-ascend spec_decode",
    ),
    Conflict(
        key="drafts-dynamic-dcp",
        names=("additional_config.dynamic_spec_config.method", "decode_context_parallel_size"),
        holds=lambda asked: (
            asked.flags.additional_config.dynamic_spec_config.method is not None
            and asked.flags.decode_context_parallel_size > 1
        ),
        outcome=Outcome.REFUSE,
        text="changing draft counts and a cut cache do not go together",
        source="vllm-ascend worker/model_runner_v1.py",
    ),
    Conflict(
        key="xlite-drafts",
        names=(_XLITE, _DRAFTS),
        holds=lambda asked: (
            asked.flags.additional_config.xlite_graph_config.enabled and asked.num_drafts > 1
        ),
        outcome=Outcome.REFUSE,
        text="xlite checks one draft token",
        source="vllm-ascend ascend_config.py",
    ),
    Conflict(
        key="xlite-pp",
        names=(_XLITE, "pipeline_parallel_size"),
        holds=lambda asked: (
            asked.flags.additional_config.xlite_graph_config.enabled
            and asked.flags.pipeline_parallel_size > 1
        ),
        outcome=Outcome.REFUSE,
        text="xlite runs one stage",
        source="vllm-ascend ascend_config.py",
    ),
)

GRAPHS: Final = (*CAPTURE, *DRAFTS)
