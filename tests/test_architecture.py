"""The house rules that no tool checks: sizes, doors by name, one test file per source file."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
P95_FUNCTION_LINES = 40
PURE_MODULES = {
    "services/scheduler": (
        *("sequence", "block_pool", "core", "plan", "batch", "results", "admission", "waiting"),
        *("placement", "replica", "replicas", "ticks", "deadlines", "limits"),
        *("policy", "throttle", "passing", "pace", "backlog", "placer", "plan_builder"),
        *("prefix_cache", "cache_events", "naming"),
    ),
    "services/detokenizer": (
        *("text", "stops", "machine", "assemble", "schema"),
        *("calls", "chat", "completion", "choice", "response", "session", "usage"),
        *("ordered", "response_object", "response_events", "message_object", "message_events"),
        *("token_object", "presenters"),
        *("placement", "credit", "summed_load", "journey"),
    ),
}
IMPURE = {"grpc", "asyncio", "torch", "socket", "threading", "time"}
# `from time import ...` counts as well; a pure core takes time as an argument.


def _tracked(*patterns: str) -> list[Path]:
    out = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [ROOT / line for line in out.splitlines() if (ROOT / line).is_file()]


def _sources() -> list[Path]:
    return _tracked("services/*.py", "shared/*.py")


def _functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse(path.read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def _rel(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_no_file_is_longer_than_the_limit() -> None:
    files = _tracked("services/*.py", "shared/*.py", "tools/*.py", "benchmarks/*.py", "tests/*.py")
    long = {_rel(f): n for f in files if (n := f.read_text().count("\n")) > MAX_FILE_LINES}
    assert not long


def test_no_function_is_longer_than_the_limit() -> None:
    files = [*_sources(), *_tracked("tools/*.py", "benchmarks/*.py")]
    long = {
        f"{_rel(f)}:{fn.name}": size
        for f in files
        for fn in _functions(f)
        if (size := (fn.end_lineno or fn.lineno) - fn.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert not long


def test_most_functions_are_short() -> None:
    sizes = sorted(
        (fn.end_lineno or fn.lineno) - fn.lineno + 1 for f in _sources() for fn in _functions(f)
    )
    assert sizes[int(0.95 * len(sizes))] <= P95_FUNCTION_LINES


def test_grpc_is_imported_only_at_the_doors() -> None:
    def is_door(path: Path) -> bool:
        name = path.name
        return name == "server.py" or name.endswith("_client.py")

    shared_doors = {"shared/rpc.py", "shared/health.py", "shared/admin.py", "shared/probe.py"}
    guilty = [
        _rel(f)
        for f in _sources()
        if any(n.split(".")[0] in {"grpc", "grpc_health", "grpc_reflection"} for n in _imports(f))
        and not is_door(f)
        and not (_rel(f) in shared_doors or _rel(f).startswith("shared/rpc"))
    ]
    assert not guilty


def test_proto_messages_stop_at_the_doors() -> None:
    allowed = {
        "shared/wire.py",
        "shared/wire_constraint.py",
        "shared/rpc.py",
        "shared/admin.py",
        "shared/health.py",
    }
    guilty = [
        _rel(f)
        for f in _sources()
        if any(n.startswith("protos.") for n in _imports(f))
        and f.name != "server.py"
        and not f.name.endswith("_client.py")
        and _rel(f) not in allowed
        and not _rel(f).startswith("shared/rpc")
    ]
    assert not guilty


@pytest.mark.parametrize("package", sorted(PURE_MODULES))
def test_pure_cores_do_no_input_or_output(package: str) -> None:
    for name in PURE_MODULES[package]:
        path = ROOT / package / f"{name}.py"
        assert path.exists(), f"{path} left the list of pure modules or was renamed"
        assert not {n.split(".")[0] for n in _imports(path)} & IMPURE, _rel(path)


def test_torch_npu_is_imported_in_one_place() -> None:
    users = [_rel(f) for f in _sources() if any("torch_npu" in n for n in _imports(f))]
    assert len(users) <= 1


def test_every_source_file_has_its_test_file() -> None:
    """A source file is named by a test of the same name, or its package has one test for it."""
    missing = []
    for path in _sources():
        rel = path.relative_to(ROOT)
        if path.name in {"__init__.py", "__main__.py"} or path.read_text().count("\n") < 30:
            continue
        folder = ROOT / "tests" / rel.parent
        if not (folder / f"test_{path.stem}.py").exists():
            missing.append(rel.as_posix())
    assert not missing


def test_every_parameter_and_return_is_annotated() -> None:
    def bare(fn: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
        spec = fn.args
        named = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs]
        loose = [a for a in named if a.annotation is None and a.arg not in {"self", "cls"}]
        return bool(loose) or fn.returns is None

    guilty = [f"{_rel(f)}:{fn.name}" for f in _sources() for fn in _functions(f) if bare(fn)]
    assert not guilty


def test_nothing_is_left_for_later() -> None:
    words = ("NotImplementedError", "TODO", "FIXME", "XXX")
    guilty = [f"{_rel(f)}: {word}" for f in _sources() for word in words if word in f.read_text()]
    assert not guilty


def test_tests_outweigh_sources() -> None:
    source = sum(f.read_text().count("\n") for f in _sources())
    tests = sum(f.read_text().count("\n") for f in _tracked("tests/*.py"))
    assert tests >= 0.9 * source
