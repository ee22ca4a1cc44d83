import pytest

from services.worker.settings import WorkerSettings
from shared.config import parse
from shared.errors import ConfigError

BASE = ["--address", "unix:/tmp/w.sock"]


def test_flags_have_vllm_names() -> None:
    flags = "--model m --dtype float32 --max-model-len 4096 --max-num-seqs 8"
    flags += " --max-num-batched-tokens 512 --kv-cache-memory-bytes 1000000"
    settings = parse(WorkerSettings, BASE + flags.split())
    assert settings.max_model_len == 4096
    assert settings.kv_cache_memory_bytes == 1_000_000


def test_the_two_eight_bit_caches_are_independent() -> None:
    flags = [*BASE, "--model", "m"]
    plain = parse(WorkerSettings, flags)
    assert (plain.enable_sparse_li_c8, plain.enable_sparse_sfa_c8) == (False, False)
    keys = parse(WorkerSettings, [*flags, "--enable-sparse-li-c8"])
    assert (keys.enable_sparse_li_c8, keys.enable_sparse_sfa_c8) == (True, False)
    latents = parse(
        WorkerSettings, [*flags, "--enable-sparse-sfa-c8", "--no-enable-sparse-li-c8"]
    )  # fmt: skip
    assert (latents.enable_sparse_li_c8, latents.enable_sparse_sfa_c8) == (False, True)


@pytest.mark.parametrize("sizes", ["[4, 16]", "4,16"])
def test_steps_are_captured_unless_that_is_switched_off(sizes: str) -> None:
    flags = [*BASE, "--model", "m"]
    assert parse(WorkerSettings, flags).captures_steps
    assert not parse(WorkerSettings, [*flags, "--enforce-eager"]).captures_steps
    assert not parse(WorkerSettings, [*flags, "--cudagraph-mode", "NONE"]).captures_steps
    chosen = parse(WorkerSettings, [*flags, f"--cudagraph-capture-sizes={sizes}"])
    assert chosen.captures_steps
    assert chosen.cudagraph_capture_sizes == (4, 16)


def test_a_model_is_required_in_model_mode_only() -> None:
    with pytest.raises(ConfigError, match="--model is required"):
        parse(WorkerSettings, BASE)
    assert parse(WorkerSettings, [*BASE, "--worker-mode", "replay"]).model is None


def test_a_step_must_hold_a_token_of_every_sequence() -> None:
    flags = ["--worker-mode", "replay", "--max-num-seqs", "64", "--max-num-batched-tokens", "63"]
    with pytest.raises(ConfigError, match=r"63 must be at least --max-num-seqs 64"):
        parse(WorkerSettings, BASE + flags)


def test_drafts_are_off_unless_asked_for() -> None:
    assert parse(WorkerSettings, [*BASE, "--model", "m"]).num_speculative_tokens == 0
    flags = ["--model", "m", "--num-speculative-tokens", "3"]
    assert parse(WorkerSettings, BASE + flags).num_speculative_tokens == 3


def test_by_default_a_step_holds_the_drafts_of_every_sequence() -> None:
    flags = ["--model", "m", "--num-speculative-tokens", "3", "--max-num-batched-tokens", "256"]
    assert parse(WorkerSettings, BASE + flags).max_num_seqs == 64


def test_a_step_must_hold_a_token_and_all_drafts_of_one_sequence() -> None:
    flags = ["--model", "m", "--num-speculative-tokens", "3", "--max-num-batched-tokens", "3"]
    with pytest.raises(ConfigError, match=r"tokens 3: --max-num-batched-tokens 3 must be more"):
        parse(WorkerSettings, BASE + flags)


def test_a_replay_worker_cannot_draft() -> None:
    flags = ["--worker-mode", "replay", "--num-speculative-tokens", "1"]
    with pytest.raises(ConfigError, match=r"--num-speculative-tokens 1: a replay worker"):
        parse(WorkerSettings, BASE + flags)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--worker-mode", "other"),
        ("--dtype", "float16"),
        ("--max-model-len", "1"),
        ("--max-num-seqs", "0"),
        ("--kv-cache-memory-bytes", "0"),
        ("--gpu-memory-utilization", "1.5"),
        ("--num-kv-blocks", "1"),
        ("--num-speculative-tokens", "-1"),
        ("--num-speculative-tokens", "16"),
        ("--npu-generation", "a4"),
        ("--num-threads", "-1"),
        ("--cudagraph-mode", "PIECEWISE"),
        ("--cudagraph-capture-sizes", "[4, 0]"),
        ("--max-cudagraph-capture-size", "0"),
        ("--stall-timeout-s", "0"),
    ],
)
def test_a_wrong_value_is_refused_with_its_flag(flag: str, value: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        parse(WorkerSettings, [*BASE, "--model", "m", flag, value])


def test_ranks_of_a_joint_world_are_numbered_through() -> None:
    flags = "--model m --tensor-parallel-size 2 --pipeline-parallel-size 2 --data-parallel-size 2"
    flags += " --rendezvous file:///tmp/x --data-parallel-rank 1 --rank 3"
    apart = parse(WorkerSettings, BASE + flags.split())
    assert (apart.world_rank, apart.topology.joint_size, apart.is_leader) == (3, 4, False)
    joint = parse(WorkerSettings, [*BASE, *flags.split(), "--enable-expert-parallel"])
    assert (joint.world_rank, joint.topology.joint_size) == (7, 8)
    leader = parse(WorkerSettings, [*BASE, *flags.split(), "--rank", "0"])
    assert leader.is_leader


def test_stages_have_the_layers_of_the_partition() -> None:
    flags = "--model m --pipeline-parallel-size 2 --rendezvous file:///x --pp-layer-partition 41,37"
    assert parse(WorkerSettings, BASE + flags.split()).topology.layer_partition == (41, 37)


def test_a_worker_is_one_rank_unless_told_otherwise() -> None:
    settings = parse(WorkerSettings, [*BASE, "--model", "m"])
    assert (settings.topology.joint_size, settings.is_leader, settings.world_rank) == (1, True, 0)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--tensor-parallel-size 2", "--rendezvous is required for 2 ranks"),
        ("--rank 1", "--rank 1 is not below the 1 ranks"),
        ("--tensor-parallel-size 2 --rendezvous file:///x --rank 2", "--rank 2 is not below the 2"),
        ("--data-parallel-rank 1", "--data-parallel-rank 1 is not below --data-parallel-size 1"),
        (
            "--worker-mode replay --tensor-parallel-size 2 --rendezvous file:///x",
            "--worker-mode replay: a replay worker is one rank",
        ),
        ("--enable-dsa-cp", "--enable-dsa-cp: tokens are cut over ranks"),
        (
            "--enable-flashcomm1 --pipeline-parallel-size 2 --rendezvous file:///x",
            "--enable-flashcomm1: .* --tensor-parallel-size is 1",
        ),
        ("--moe-comm-method mc2", "--moe-comm-method mc2: no experts are spread over ranks"),
        (
            "--moe-comm-method mc2 --device npu --tensor-parallel-size 2 --enable-expert-parallel "
            "--rendezvous file:///x",
            "--moe-comm-method mc2: only on a CPU",
        ),
        (
            "--pipeline-parallel-size 2 --rendezvous file:///x --pp-layer-partition 41",
            "--pp-layer-partition 41 has 1 stages, --pipeline-parallel-size is 2",
        ),
    ],
)
def test_ranks_that_cannot_be_are_refused_by_flag(flags: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(WorkerSettings, [*BASE, "--model", "m", *flags.split()])
