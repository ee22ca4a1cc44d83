import io

from rich.console import Console

from services.worker.model.config import ModelConfig
from services.worker.sizing.advice import Advice, advise
from services.worker.sizing.deployment import Deployment
from services.worker.sizing.hardware import MIB
from services.worker.sizing.plan import make_plan
from services.worker.sizing.report import show, verdict_text
from tests.services.worker.sizing.conftest import MakeDeployment


def printed(deployment: Deployment) -> str:
    stream = io.StringIO()
    plan = make_plan(deployment)
    show(plan, advise(plan), Console(file=stream, width=200))
    return stream.getvalue()


def test_the_table_has_weights_runtime_blocks_and_verdict(make_deployment: MakeDeployment) -> None:
    text = printed(
        make_deployment(
            "dp2,tp8,ep",
            "w4a8c8",
            li=True,
            max_model_len=135_000,
            max_num_seqs=12,
            num_full_seqs=12,
            num_speculative_tokens=3,
        )
    )
    assert text.startswith(
        "w4a8c8 weights, dp2,tp8,ep, 16 x Atlas A3 (64 GB per die), 1 node; latent plain, indexer "
        "keys int8, 3 drafts\n"
    )
    lines = [line.rstrip() for line in text.splitlines()]
    for start in (
        "weights ",
        "  embeddings",
        "  attention",
        "  dense MLP",
        "  experts",
        "  shared",
        "  indexer",
        "  MTP",
        "beside the weights",
        "~ largest step",
        "  HCCL tp",
        "  MC2 window",
        "free for KV blocks",
        "bytes per block",
        "blocks",
        "tokens of a replica",
        "sequences at once",
    ):
        assert any(line.startswith(start) for line in lines), start
    assert any(line.startswith("bytes per token") and line.endswith("93,868") for line in lines)
    assert "any one of these makes it fit:" in lines
    assert lines[-1].startswith("GiB; ~ marks estimates")


def test_stages_are_columns(make_deployment: MakeDeployment) -> None:
    text = printed(make_deployment("pp2[41/37],tp16,ep", li=True, num_speculative_tokens=1))
    (line,) = [line for line in text.splitlines() if line.startswith("bytes per token")]
    assert line.split()[-2:] == ["48,792", "45,076"]
    assert "stage 0 (x16)  stage 1 (x16)" in text
    assert "note: stage 1 starts at layer 41" in text


def test_many_stages_are_told_by_the_tightest(make_deployment: MakeDeployment) -> None:
    text = printed(make_deployment("pp78,tp1", max_model_len=8192))
    (line,) = [line for line in text.splitlines() if line.startswith("blocks")]
    assert len(line.split()) == 1 + 6
    shown = min(int(cell.replace(",", "")) for cell in line.split()[1:])
    assert shown == make_plan(make_deployment("pp78,tp1", max_model_len=8192)).num_blocks
    assert "more kinds of ranks, with more room than these" in text
    assert max(map(len, text.splitlines())) <= 200


def test_help_that_is_not_enough_says_so(make_deployment: MakeDeployment) -> None:
    small = make_plan(make_deployment("dp2,tp8,ep", "w4a8c8", max_model_len=1_048_576))
    gains = advise(make_plan(make_deployment("dp2,tp8,ep", "w4a8c8", max_model_len=8192))).gains
    stream = io.StringIO()
    show(small, Advice(gains=gains), Console(file=stream, width=200))
    assert "these help, but none of them is enough:\n" in stream.getvalue()


def test_a_small_model_is_shown_in_mib(make_deployment: MakeDeployment, nano: ModelConfig) -> None:
    deployment = make_deployment(
        "tp1", "bf16", "cpu", config=nano, max_model_len=8192, kv_cache_bytes=512 * MIB
    )
    text = printed(deployment)
    assert "beside the weights" not in text
    assert any(line.split()[-1:] == ["512.00"] for line in text.splitlines())
    assert text.splitlines()[-1].startswith("MiB;")


def test_the_verdict_is_a_sentence_with_numbers(make_deployment: MakeDeployment) -> None:
    def said(scheme: str, **fields: int) -> str:
        return verdict_text(make_plan(make_deployment("dp2,tp8,ep", scheme, **fields)))

    fits = said("w4a8c8", max_model_len=8192)
    assert fits.startswith("fits: ")
    assert fits.endswith("sequences of 8,192 tokens at once, 1 asked for")
    some = said("w4a8c8", max_model_len=135_000, max_num_seqs=12, num_full_seqs=12)
    assert some.startswith("starts, but holds ")
    assert some.endswith("12 are asked for")
    small = said("w4a8c8", max_model_len=1_048_576)
    assert "one sequence of 1,048,576 tokens takes 8,193 blocks" in small
    assert "GiB a device too much before the first block" in said("bf16", max_model_len=8192)
