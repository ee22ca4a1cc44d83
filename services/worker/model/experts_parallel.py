"""Mixture of experts whose routed experts are whole on the ranks of an expert-parallel group."""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from torch import Tensor

from services.worker.model.exchange import Exchange, Gate, GatherExchange
from services.worker.model.exchange_alltoall import AllToAllExchange
from services.worker.model.exchange_mc2 import Mc2Exchange
from services.worker.model.experts import Router, make_experts
from services.worker.model.metadata import ExpertTraffic
from services.worker.model.mlp import make_mlp
from services.worker.model.routed import RoutedExperts
from services.worker.model.slots import WeightSlot
from services.worker.model.spec import ModelSpec
from services.worker.model.step import StepInputs
from services.worker.parallel.moe_method import MoeMethod

_MakeExchange = Callable[[ModelSpec, Gate, RoutedExperts], Exchange]
_EXCHANGES: Mapping[MoeMethod, _MakeExchange] = MappingProxyType(
    {
        MoeMethod.ALLGATHER: GatherExchange,
        MoeMethod.ALLTOALL: AllToAllExchange,
        MoeMethod.MC2: Mc2Exchange,
    }
)


class ExpertParallelMixture:
    """``sum_j weight_j * expert_j(x) + shared(x)``.

    Of a whole stream the shared expert is cut over the tensor-parallel ranks and the routed sum
    comes back cut by tokens or in parts, so that one reduction adds up both. Of a cut stream the
    shared expert is whole, and a rank has all that belongs to its tokens.
    """

    def __init__(self, spec: ModelSpec, prefix: str) -> None:
        config = spec.config
        self.gate = Router(config, spec.device, f"{prefix}gate.")
        self.experts = make_experts(spec, f"{prefix}experts.")
        width = config.moe_intermediate_size * config.n_shared_experts
        self._is_whole = spec.placement.has_whole_shared_experts
        self.shared_experts = make_mlp(
            spec, f"{prefix}shared_experts.", width, is_whole=self._is_whole
        )
        self._beside = spec.beside
        self._exchanges: dict[MoeMethod, Exchange] = {
            method: make(spec, self.gate, self.experts) for method, make in _EXCHANGES.items()
        }

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        """[.., E] -> [.., E] in the form of the stream."""
        stream = step.stream
        assert stream.is_cut == self._is_whole
        num_tokens = stream.share.num_rows
        traffic = step.traffic or ExpertTraffic(method=MoeMethod.ALLGATHER, num_tokens=num_tokens)
        shared = self._beside.start(self.shared_experts, x)
        sums, place = self._exchanges[traffic.method].sums(x, stream, traffic)
        total = shared()
        total[place].add_(sums)
        return total if stream.is_cut else stream.add_up(total)

    def slots(self) -> Iterator[WeightSlot]:
        """Checkpoint tensors of this block."""
        yield from self.gate.slots()
        yield from self.experts.slots()
        yield from self.shared_experts.slots()

    def finish_loading(self) -> None:
        """Finish the router and the experts, routed and shared."""
        self.gate.finish_loading()
        self.experts.finish_loading()
        self.shared_experts.finish_loading()
