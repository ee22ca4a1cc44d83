"""glm-nano, quantized with the command that users have and served like any checkpoint."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.mesh import Mesh
from tools.nano.evaluate import judge, request_body
from tools.nano.tasks import make_task

NANO = Path(__file__).parents[2] / "models" / "glm-nano"
C8 = ("--additional-config", '{"enable_sparse_li_c8": true}')
# A look-up has over four times index_topk tokens, so selection counts. bfloat16 solves all.
SKILLS = ("sums", "lookup", "tool_call", "echo")


@pytest.mark.parametrize(("scheme", "flags"), [("w8a8", ()), ("w4a8c8", C8)])
def test_a_quantized_model_is_served(tmp_path: Path, scheme: str, flags: tuple[str, ...]) -> None:
    target = tmp_path / "glm-nano"
    command = [str(Path(sys.executable).parent / "glm-mesh"), "quantize", str(NANO), str(target)]
    done = subprocess.run(
        [*command, "--scheme", scheme], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    mesh = Mesh("--model", str(target), "--quantization", "ascend", "--num-threads", "1", *flags)
    try:
        client = mesh.client()
        for task in (make_task(skill, 0) for skill in SKILLS):
            body = request_body(task, "glm-nano")
            switches = {"chat_template_kwargs": body.pop("chat_template_kwargs", {})}
            reply = client.chat.completions.create(**body, extra_body=switches)
            assert judge(task, reply.choices[0].message.model_dump()), (task.skill, reply)
    finally:
        code = mesh.stop()
        mesh.remove()
    assert code == 0, mesh.screen
