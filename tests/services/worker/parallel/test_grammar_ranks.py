"""Constrained rows of replicas of several ranks: masks are made by the one that samples."""

import re
from pathlib import Path
from typing import Any

import pytest

from services.worker.model_build import build_model_executor
from services.worker.parallel.topology import Topology
from shared.glm.tokenizer import load_vocabulary
from tests.services.worker.parallel.executor_cases import make_settings, run_jobs
from tests.services.worker.parallel.grammar_cases import EOS, make_jobs
from tests.services.worker.parallel.ranks import Ranks

NANO = Path("models/glm-nano").resolve()
FLAGS = {"dtype": "float32", "max_model_len": 512}
JOBS: list[dict[str, Any]] = [
    {"prompt": [1, 2, 3], "regex": "[a-c]{5}-[0-9]{3}", "temperature": 1.0, "seed": 3},
    {"prompt": [4] * 40, "regex": "(yes|no)( (yes|no)){4}", "temperature": 0.0},
    {"prompt": [9, 8], "temperature": 0.0},
    # What it said before does not follow its grammar: it fails, on all ranks alike.
    {"prompt": [5, 6], "regex": "[0-9]+", "outputs": [1], "temperature": 0.0},
]


@pytest.mark.parametrize(("layout", "num_drafts"), [("tp2", 3), ("pp2[3/2]", 0)])
def test_ranks_follow_a_grammar_as_one_rank_does(
    ranks: Ranks, layout: str, num_drafts: int
) -> None:
    flags = {**FLAGS, "num_speculative_tokens": num_drafts}
    found = ranks.run(
        Topology.parse(layout).world_size,
        "grammar_cases:run_constrained",
        path=str(NANO),
        topology=layout,
        jobs=JOBS,
        **flags,
    )
    results = found[0][:-1]
    settings = make_settings(str(NANO), enforce_eager=True, **flags)
    alone = run_jobs(build_model_executor(settings, NANO), make_jobs(JOBS))[:-1]
    assert results == alone
    vocabulary = load_vocabulary(NANO)
    for job, result in list(zip(JOBS, results, strict=True))[:2]:
        text = vocabulary.decode(t for t in result["outputs"] if t not in EOS)
        assert re.fullmatch(job["regex"], text)
    assert results[2]["error"] is None
    assert "constraint" in results[3]["error"]
