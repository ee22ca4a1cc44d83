import pytest

from services.launcher.options.additional import AdditionalConfig
from services.launcher.options.deployment import Deployment, named
from services.launcher.options.environment import Environment
from services.launcher.options.idle import IDLE
from services.launcher.options.passing import AS_IT_IS, LAYOUT, PASSED
from services.launcher.options.serve import ServeOptions
from services.launcher.options.unbuilt import UNBUILT
from tests.services.launcher.options.cases import drafts, extra, graphs, verdict


def paths() -> list[str]:
    """Every option, down to the keys of --additional-config and the variables."""
    return [
        *(name for name in ServeOptions.model_fields if name != "additional_config"),
        *(
            f"additional_config.{name}"
            for name in AdditionalConfig.model_fields
            if name != "scheduler_config"  # its keys are those outside, or have a line
        ),
        "additional_config.scheduler_config.dyntra_lb_config",
        *(f"environment.{name}" for name in Environment.model_fields),
    ]


def test_every_option_is_honoured_or_refused_or_told() -> None:
    handled = {
        *(rule.name for rule in UNBUILT),
        *(name for rule in IDLE for name in rule.names),
        *(passed.name for passed in PASSED),
        *AS_IT_IS,
        *LAYOUT,
    }
    assert [path for path in paths() if path not in handled] == []
    for name in handled:
        Deployment().value(name)  # a name that is none fails here


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("-tp 2 -dcp 2", "--decode-context-parallel-size 2"),
        ("--nnodes 2 -tp 2", "--nnodes 2"),
        ("-dp 2 -dpl 1", "--data-parallel-size-local 1"),
        ("-dp 2 -dpr 1 -dpl 1", "--data-parallel-start-rank 1"),
        ("-dp 2 -dpn 1", "--data-parallel-rank 1"),
        ("-dp 2 -dpe", "--data-parallel-external-lb"),
        ("--headless", "--headless"),
        ("--guided-decoding-backend xgrammar", "--guided-decoding-backend xgrammar"),
        (
            """--structured-outputs-config '{"backend": "outlines"}'""",
            "--structured-outputs-config backend=outlines",
        ),
        (
            """--structured-outputs-config '{"enable_in_reasoning": true}'""",
            "--structured-outputs-config enable_in_reasoning=true",
        ),
        ("--api-server-count 0", "--api-server-count 0"),
        ("--distributed-executor-backend ray", "--distributed-executor-backend ray"),
        (drafts(3, method="eagle"), "--speculative-config method=eagle"),
        (drafts(3, model="/other"), "--speculative-config model=/other"),
        (
            drafts(3, draft_tensor_parallel_size=2),
            "--speculative-config draft_tensor_parallel_size=2",
        ),
        (
            extra(dynamic_spec_config={"method": "dspark"}),
            "--additional-config dynamic_spec_config",
        ),
        (graphs(mode="PIECEWISE"), "--compilation-config cudagraph_mode=PIECEWISE"),
        (graphs(mode="FULL"), "--compilation-config cudagraph_mode=FULL"),
        ("--prefix-caching-hash-algo xxhash", "--prefix-caching-hash-algo xxhash"),
        ("--no-enable-chunked-prefill", "--no-enable-chunked-prefill"),
        ("--no-enable-auto-tool-choice", "--no-enable-auto-tool-choice"),
        ("--kv-transfer-config.kv_connector MooncakeConnectorV1", "--kv-transfer-config"),
        ("--profiler-config.profiler torch", "--profiler-config"),
        ("--safetensors-load-strategy torchao", "--safetensors-load-strategy torchao"),
        ("--load-format dummy", "--load-format dummy"),
        ("--enable-lora", "--enable-lora"),
        ("--ssl-keyfile k", "--ssl-keyfile k"),
        (extra(mix_placement=True), "--additional-config mix_placement=true"),
    ],
)
def test_what_is_not_built_refuses_by_name(text: str, shown: str) -> None:
    refusals = verdict(text).refusals
    assert any(refusal.startswith(f"{shown}: not available: ") for refusal in refusals)


@pytest.mark.parametrize(
    "text",
    [
        "-tp 1 -pp 1 -dp 1 -dcp 1 -pcp 1 --nnodes 1 --node-rank 0",
        "-tp 2",
        "-tp 2 -pp 2",
        "-pp 2 --enable-expert-parallel -tp 2",
        "-dp 2",
        "-dp 2 -ep -dpl 2 -dpr 0",
        "VLLM_PP_LAYER_PARTITION=41,37 -pp 2",
        "--distributed-executor-backend mp",
        "--api-server-count 1",
        "--block-size 128",
        "--enable-prefix-caching --prefix-caching-hash-algo sha256",
        "--kv-cache-dtype auto --load-format safetensors",
        "--kv-cache-dtype bfloat16",
        "--no-enable-prefix-caching --no-async-scheduling --enable-chunked-prefill",
        "--enable-auto-tool-choice --enforce-eager --no-trust-remote-code",
        "--compilation-config {}",
        graphs("none"),
        drafts(3),
        drafts(5, method="mtp", draft_tensor_parallel_size=1),
        "--speculative-config.num-speculative-tokens 1",
        extra(enable_fused_mc2=0, enable_dsa_cp=False, recompute_scheduler_enable=False),
    ],
)
def test_asking_for_what_is_so_anyway_is_fine(text: str) -> None:
    found = verdict(text)
    assert not found.refusals
    assert not found.lines


def test_every_refusal_says_what_is_missing() -> None:
    assert all(rule.missing for rule in UNBUILT)
    assert len({rule.name for rule in UNBUILT}) == len(UNBUILT)
    assert all(named(rule.name).startswith("--") for rule in UNBUILT)
