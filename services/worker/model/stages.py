"""What passes from one pipeline stage to the next.

Hidden states and their running residual travel together. A stage that begins with layers without
an indexer of their own also gets the positions that an earlier stage selected, and passes them on
if the next one needs them too.
"""

import torch
from torch import Tensor

from services.worker.model.config import SHARED, ModelConfig
from services.worker.model.spec import ModelSpec
from services.worker.model.step import StepInputs


class StageSeam:
    """Both ends of a stage."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._group = spec.groups.pp
        layers = spec.placement.layers(spec.config)
        self.takes_topk = shares_selection(spec.config, layers.start)
        self.gives_topk = shares_selection(spec.config, layers.stop)

    def receive(self, step: StepInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states, residual and selected positions of a step, from the stage before.

        Ranks that cut tokens have the same share on each stage, and pass on that alone.
        """
        spec, before = self._spec, self._group.rank - 1
        shape = (2, step.stream.num_rows, spec.config.hidden_size)
        states = torch.empty(shape, dtype=spec.dtype, device=spec.device)
        self._group.receive(states, before)
        width = spec.config.index_topk if self.takes_topk else 0
        topk = torch.empty((step.num_rows, 1, width), dtype=torch.int32, device=spec.device)
        if self.takes_topk:
            self._group.receive(topk, before)
        return states[0], states[1], topk

    def send(self, x: Tensor, residual: Tensor, topk: Tensor) -> None:
        """Give the next stage what its `receive` returns."""
        after = self._group.rank + 1
        self._group.send(torch.stack((x, residual)), after)
        if self.gives_topk:
            self._group.send(topk, after)


def shares_selection(config: ModelConfig, layer: int) -> bool:
    """Whether a decoder layer attends to positions that an earlier one selected."""
    return layer < config.num_hidden_layers and config.indexer_types[layer] == SHARED
