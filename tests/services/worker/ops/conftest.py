"""The CPU kernels in every version this machine has, and random steps over paged caches."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from services.worker.ops import build, registry
from services.worker.ops.native import Native
from services.worker.ops.variants import VARIANTS, cpu_flags, library_path

VERSIONS = ["torch", *(variant.name for variant in VARIANTS)]


@pytest.fixture(scope="session")
def compiled() -> dict[str, Native]:
    """Every build this CPU can run, compiled from the sources as they are now."""
    build.build_all()
    flags = cpu_flags()
    return {
        variant.name: Native(library_path(variant))
        for variant in VARIANTS
        if variant.is_buildable and variant.flags <= flags
    }


@pytest.fixture(params=VERSIONS)
def kernels(
    request: pytest.FixtureRequest, compiled: dict[str, Native]
) -> dict[str, Callable[..., object]]:
    """Kernels by operator name, once per version."""
    if request.param == "torch":
        return registry.cpu_kernels(None)
    if request.param not in compiled:
        pytest.skip(f"this CPU does not run the {request.param} build")
    return registry.cpu_kernels(compiled[request.param])


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(20260707)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedStep:
    """A step of several sequences whose blocks lie in no order."""

    query_lens: list[int]
    seq_lens: list[int]
    num_blocks: int
    block_table: Tensor

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def lengths(self) -> dict[str, Tensor]:
        return {
            "cum": torch.tensor(self.query_lens).cumsum(0).to(torch.int32),
            "seq": torch.tensor(self.seq_lens, dtype=torch.int32),
        }

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """Token, its sequence and the number of keys it may see."""
        token = 0
        for sequence, (queries, keys) in enumerate(
            zip(self.query_lens, self.seq_lens, strict=True)
        ):
            for query in range(queries):
                yield token, sequence, max(keys - queries + query + 1, 0)
                token += 1

    def cached(self, cache: Tensor, sequence: int, position: int) -> Tensor:
        block = int(self.block_table[sequence, position // 128])
        return cache[block, position % 128, 0].float()


@pytest.fixture
def make_step(generator: torch.Generator) -> Callable[..., PagedStep]:
    def make(query_lens: list[int], seq_lens: list[int]) -> PagedStep:
        needed = [-(-length // 128) for length in seq_lens]
        num_blocks = sum(needed) + 3
        order = torch.randperm(num_blocks - 1, generator=generator) + 1
        table = torch.zeros((len(seq_lens), max(needed) + 1), dtype=torch.int32)
        first = 0
        for sequence, count in enumerate(needed):
            table[sequence, :count] = order[first : first + count]
            first += count
        return PagedStep(
            query_lens=query_lens, seq_lens=seq_lens, num_blocks=num_blocks, block_table=table
        )

    return make
