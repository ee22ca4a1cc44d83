"""Options of `vllm serve`, from the command line to the answer."""

from tests.e2e.mesh import Mesh

FLAGS = (
    *("--seed", "1024", "--max_model_len", "2K", "--max-num-seqs=8", "--block-size", "128"),
    *("--safetensors-load-strategy", "prefetch", "--enforce-eager", "--trust-remote-code"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "glm47", "--reasoning-parser", "glm45"),
    *("--additional-config", '{"multistream_overlap_shared_expert": true,\n "enable_dsa_pc": 1}'),
)


def answers() -> list[str]:
    """What a mesh says to two requests without a seed, at a temperature where seeds matter."""
    mesh = Mesh(*FLAGS)
    try:
        assert mesh.screen.count("glm-mesh: note: ") == 3
        assert "multistream_overlap_shared_expert=true: no effect" in mesh.screen
        assert "enable_dsa_pc: unknown key, ignored; did you mean enable_dsa_cp?" in mesh.screen
        assert "--trust-remote-code: no effect" in mesh.screen
        client = mesh.client()
        served = client.models.list().data[0].model_extra or {}
        assert served["max_model_len"] == 2048
        return [
            client.completions.create(model="glm-nano", prompt="a", max_tokens=24, temperature=2.0)
            .choices[0]
            .text
            for _ in range(2)
        ]
    finally:
        mesh.stop()
        mesh.remove()


def test_a_mesh_started_again_with_its_seed_says_the_same_again() -> None:
    first, again = answers(), answers()
    assert first == again
    assert first[0] != first[1]
