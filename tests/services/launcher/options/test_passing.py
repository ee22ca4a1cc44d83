import pytest

from services.frontend.settings import FrontendSettings
from services.launcher.options.passing import PASSED, service_flags
from services.scheduler.settings import SchedulerSettings
from services.worker.settings import WorkerSettings
from shared.config import ServiceSettings, flag_of
from tests.services.launcher.options.cases import deployment, drafts, extra, graphs, join


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("", {}),
        (
            "--safetensors-load-strategy prefetch",
            {"worker": ("--safetensors-load-strategy=prefetch",)},
        ),
        ("--safetensors-load-strategy none", {}),
        (extra(enable_sparse_li_c8=True), {"worker": ("--enable-sparse-li-c8",)}),
        (extra(enable_sparse_sfa_c8=False), {"worker": ("--no-enable-sparse-sfa-c8",)}),
        (extra(weight_nz_mode=0), {"worker": ("--weight-nz-mode=0",)}),
        ("VLLM_ASCEND_ENABLE_NZ=2", {"worker": ("--weight-nz-mode=2",)}),
        (drafts(3), {"worker": ("--num-speculative-tokens=3",)}),
        (graphs(), {"worker": ("--cudagraph-mode=FULL_DECODE_ONLY",)}),
        (graphs(mode="NONE"), {"worker": ("--cudagraph-mode=NONE",)}),
        (
            graphs(sizes=[4, 16]),
            {
                "worker": (
                    "--cudagraph-mode=FULL_DECODE_ONLY",
                    "--cudagraph-capture-sizes=[4, 16]",
                )
            },
        ),
        (
            "-cc.max_cudagraph_capture_size=64",
            {"worker": ("--max-cudagraph-capture-size=64",)},
        ),
        ("-cc.cudagraph_mode=null", {}),
        (
            extra(multistream_overlap_shared_expert=True),
            {"worker": ("--multistream-overlap-shared-expert",)},
        ),
        ("--enforce-eager", {"worker": ("--enforce-eager",)}),
        ("--no-enforce-eager", {"worker": ("--no-enforce-eager",)}),
        ("--seed -7", {"frontend": ("--seed=-7",)}),
        ("--sse-keep-alive-interval 0", {"frontend": ("--sse-keep-alive-interval=0.0",)}),
        ("--async-scheduling", {"scheduler": ("--async-scheduling",)}),
        ("--enable-prefix-caching", {"scheduler": ("--enable-prefix-caching",)}),
        ("--no-enable-prefix-caching", {"scheduler": ("--no-enable-prefix-caching",)}),
        ("VLLM_SERVER_DEV_MODE=1", {"frontend": ("--enable-dev-routes",)}),
        ("VLLM_SERVER_DEV_MODE=0", {"frontend": ("--no-enable-dev-routes",)}),
        (
            "--scheduling-policy priority --priority-ageing-s 5 --watermark 0.01",
            {
                "scheduler": (
                    "--scheduling-policy=priority",
                    "--watermark=0.01",
                    "--priority-ageing-s=5.0",
                )
            },
        ),
        (
            "--long-prefill-token-threshold 0 --max-num-queued-reqs 10 --no-enable-fair-share",
            {
                "scheduler": (
                    "--long-prefill-token-threshold=0",
                    "--no-enable-fair-share",
                    "--max-queued-requests=10",
                )
            },
        ),
        (
            join("--seed 0", extra(enable_sparse_li_c8=True, weight_nz_mode=2)),
            {"worker": ("--enable-sparse-li-c8", "--weight-nz-mode=2"), "frontend": ("--seed=0",)},
        ),
    ],
)
def test_options_become_words_of_the_service_that_honours_them(
    text: str, flags: dict[str, tuple[str, ...]]
) -> None:
    assert service_flags(deployment(text)) == flags


def test_every_option_that_is_passed_on_is_a_setting_there() -> None:
    known: dict[str, type[ServiceSettings]] = {
        "worker": WorkerSettings,
        "frontend": FrontendSettings,
        "scheduler": SchedulerSettings,
    }
    for passed in PASSED:
        fields = known[passed.service].model_fields
        assert passed.flag in {flag_of(name) for name in fields}, passed
