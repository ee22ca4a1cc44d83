"""What each rank does in tests of the model: a fixed script of steps, whose logits are compared."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.worker import ops
from services.worker.loading.load import load_model
from services.worker.loading.reader import CheckpointReader
from services.worker.model.cache_format import CacheFormat
from services.worker.model.config import ModelConfig
from services.worker.model.metadata import ExpertTraffic, StepMetadata
from services.worker.model.spec import ModelSpec
from services.worker.parallel.moe_method import MoeMethod
from services.worker.parallel.topology import Topology
from services.worker.parallel.world import Membership, World
from services.worker.quant.convert import Conversion, Job
from services.worker.quant.recipe import RECIPES
from services.worker.quant.scheme import QuantDescription
from services.worker.quant.writer import CheckpointWriter
from tests.services.worker.model.conftest import Driver

CPU = torch.device("cpu")


def make_spec(path: str, dtype: str = "float32", caches: dict[str, Any] | None = None) -> ModelSpec:
    return ModelSpec(
        config=ModelConfig.from_dir(Path(path)),
        dtype=getattr(torch, dtype),
        device=CPU,
        quantization=QuantDescription.from_dir(Path(path)),
        cache=CacheFormat(**(caches or {})),
    )


@dataclass(frozen=True)
class Chunk:
    """Tokens of one sequence in one step."""

    sequence: int
    tokens: list[int]


def make_script(replica: int, vocab: int, is_idle: bool = False) -> list[list[Chunk]]:
    """Steps of one replica: a prompt, a chunk beside a decode, decodes; another length for each.

    An idle replica has no step of its own after the first two.
    """
    generator = torch.Generator().manual_seed(replica)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, vocab, (count,), generator=generator).tolist()

    steps = [
        [Chunk(0, tokens(21 + 6 * replica))],
        [Chunk(0, tokens(1)), Chunk(1, tokens(9 - 2 * replica))],
    ]
    if not is_idle:
        steps += [[Chunk(0, tokens(1)), Chunk(1, tokens(1 + replica))] for _ in range(3)]
    return steps


def run_alone(path: str, script: list[list[Chunk]], **options: Any) -> list[Tensor]:
    """The logits of every step of a model on one rank."""
    driver = Driver(load_model(Path(path), make_spec(path, **options)), 2, 128)
    return [
        torch.cat(driver.step([(chunk.sequence, chunk.tokens) for chunk in step]))
        for step in script
    ]


def run_model(
    rank: int,
    rendezvous: str,
    path: str,
    topology: str,
    partition: list[int] = (),
    method: str = "allgather",
    idle: list[int] = (),
    cuts: list[str] = (),
    **options: Any,
) -> list[Tensor] | None:
    """The logits of every step of this rank's replica, on its last stage."""
    ops.register()
    layout = replace(Topology.parse(topology), layer_partition=tuple(partition))
    membership = Membership(
        topology=layout, number=rank, device=CPU, rendezvous=rendezvous, timeout_s=20
    )
    world = World.join(membership)
    spec = make_spec(path, **options)
    switches = {f"is_{name}": True for name in cuts}
    placement = layout.placement(spec.config, membership.rank, **switches)
    spec = replace(spec, placement=placement, groups=world.groups)
    driver = RankDriver(load_model(Path(path), spec), 2, 128, method)
    vocab = spec.config.vocab_size
    scripts = [
        make_script(replica, vocab, replica in idle) for replica in range(layout.data_parallel_size)
    ]
    found = driver.run_script(scripts, membership.rank.dp_rank)
    world.leave()
    return found


class RankDriver(Driver):
    """A driver that tells the experts' exchange what a tick would."""

    def __init__(self, decoder: Any, num_sequences: int, max_len: int, method: str) -> None:
        super().__init__(decoder, num_sequences, max_len)
        self.method = MoeMethod(method)
        self.most = 0

    def run_script(self, scripts: list[list[list[Chunk]]], replica: int) -> list[Tensor] | None:
        own = scripts[replica]
        logits = []
        for at in range(max(map(len, scripts))):
            counts = [
                sum(len(chunk.tokens) for chunk in script[at]) if at < len(script) else 1
                for script in scripts
            ]
            self.most = max(counts)
            step = own[at] if at < len(own) else []
            found = self.forward([(chunk.sequence, chunk.tokens) for chunk in step])
            if step and found is not None:
                logits.append(found)
        return logits if self.decoder.norm is not None else None

    def forward(self, chunks: list[tuple[int, list[int]]]) -> Tensor | None:
        """Logits of all tokens; without chunks one token of padding, as a dummy step has."""
        padding = 0 if chunks else 1
        metadata = self.traffic(self.metadata(chunks, padding) if chunks else self.dummy(padding))
        ids = [token for _, tokens in chunks for token in tokens] + [0] * padding
        hidden = self.decoder.forward(torch.tensor(ids), metadata, self.caches)
        for sequence, tokens in chunks:
            self.computed[sequence] += len(tokens)
        return None if self.decoder.norm is None else self.decoder.compute_logits(hidden)

    def dummy(self, count: int) -> StepMetadata:
        return StepMetadata(
            num_tokens=count,
            positions=torch.zeros(count, dtype=torch.int64),
            slot_mapping=torch.arange(count, dtype=torch.int32),
            cum_query_lens=torch.tensor([count], dtype=torch.int32),
            seq_lens=torch.zeros(1, dtype=torch.int32),
            block_table=torch.zeros((1, 1), dtype=torch.int32),
        )

    def traffic(self, metadata: StepMetadata) -> StepMetadata:
        return replace(metadata, traffic=ExpertTraffic(method=self.method, num_tokens=self.most))


def quantize(source: Path, target: Path, recipe: str) -> None:
    """The checkpoint in another scheme, calibrated with random prompts."""
    spec = make_spec(str(source))
    generator = torch.Generator().manual_seed(9)
    prompts = torch.randint(0, spec.config.vocab_size, (4, 40), generator=generator).tolist()
    with CheckpointReader(source) as reader:
        job = Job(spec=spec, recipe=RECIPES[recipe], prompts=prompts)
        conversion = Conversion(reader, job)
        with CheckpointWriter(target, max_shard_bytes=1 << 24) as writer:
            conversion.run(writer, lambda _: None)
            values = json.loads((source / "config.json").read_text())
            writer.commit(values, conversion.description_entries())
