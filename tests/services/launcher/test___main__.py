import os
import subprocess
import sys

import pytest

from services.launcher.__main__ import EXIT_PIPE, main
from services.launcher.commands import GRPC_SWITCHES, GRPC_VARIABLE


@pytest.mark.parametrize("word", ["--help", "-h", "help"])
def test_help_lists_the_commands(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 0
    out = capsys.readouterr().out
    services = ("frontend", "detokenizer", "scheduler", "worker")
    for command in ("up", *services, "status", "plan", "quantize", "version"):
        assert f"\n  {command} " in out


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith("glm-mesh ")


@pytest.mark.parametrize("words", [["--help"], ["up", "--help"], ["version"]])
def test_a_reader_that_has_enough_is_no_error(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-P", "-m", "services.launcher", *words]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (EXIT_PIPE, b"")


@pytest.mark.parametrize("argv", [[], ["serve"]])
def test_wrong_usage_exits_with_two(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert "usage: glm-mesh" in capsys.readouterr().err


def test_a_mistake_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--enable-lora"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith("glm-mesh: --enable-lora: not available")


def test_a_services_name_replaces_this_process_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def record(path: str, argv: list[str], environment: dict[str, str]) -> None:
        seen.append([path, *argv])
        environments.append(environment)

    environments: list[dict[str, str]] = []
    monkeypatch.setattr(os, "execve", record)
    monkeypatch.delenv(GRPC_VARIABLE, raising=False)
    main(["scheduler", "--max-num-seqs", "1"])
    assert seen == [
        [sys.executable, sys.executable, "-P", "-m", "services.scheduler", "--max-num-seqs", "1"]
    ]
    assert environments == [{GRPC_VARIABLE: GRPC_SWITCHES, **os.environ}]


@pytest.mark.parametrize(
    ("tool", "module"), [("plan", "services.worker.sizing"), ("quantize", "services.worker.quant")]
)
def test_a_tool_is_the_module_inside_a_service(
    monkeypatch: pytest.MonkeyPatch, tool: str, module: str
) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(os, "execve", lambda path, argv, environment: seen.append(argv))
    main([tool, "--json"])
    assert seen == [[sys.executable, "-P", "-m", module, "--json"]]


def test_the_launcher_imports_no_service_and_nothing_heavy() -> None:
    code = (
        "import sys, services.launcher.__main__;"
        "bad = [n for n in sys.modules if n.split('.')[0] in"
        " {'grpc', 'torch', 'fastapi', 'rich', 'opentelemetry', 'tokenizers', 'numpy'}"
        " or n.startswith(('services.frontend', 'services.worker', 'services.scheduler',"
        " 'services.detokenizer'))];"
        "sys.exit(str(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_interrupt_while_modules_are_imported_leaves_no_traceback() -> None:
    """Importing takes half a second, in which a user may well think again."""
    planted = (
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'pydantic':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from services.launcher.__main__ import main\n"
        "sys.exit(main(['up']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", planted], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "glm-mesh: interrupted\n"
