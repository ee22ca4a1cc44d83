"""8-bit caches, from the option of `vllm serve` to the answer."""

import json
from collections.abc import Iterator

import pytest

from tests.e2e.mesh import Mesh, running
from tools.nano.tasks import make_task

BLOCK_BYTES = 128 * (5 * 656 + 3 * 130)  # five layers, three of them with an indexer
CONFIG = {"enable_sparse_li_c8": True, "enable_sparse_sfa_c8": True}


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    yield from running(
        *("--additional-config", json.dumps(CONFIG)),
        *("--kv-cache-memory-bytes", str(200 * BLOCK_BYTES)),
    )


def test_a_page_is_looked_up_in_eight_bits(mesh: Mesh) -> None:
    """Over four times as many tokens as are selected: indexer, selection and both caches count."""
    task = make_task("lookup", 0)
    answer = mesh.client().chat.completions.create(
        model="glm-nano",
        messages=task.messages,
        temperature=0,
        max_tokens=task.max_tokens,
        extra_body={"chat_template_kwargs": task.chat_template_kwargs},
    )
    assert task.check(answer.choices[0].message.content or "", "", [])


def test_the_worker_counts_the_smaller_blocks(mesh: Mesh) -> None:
    assert "num_blocks=200 " in mesh.log("worker")
