"""Stub libraries: exactly the symbols that nobody defines, each returning 0."""

import ctypes
from pathlib import Path

from tools.npu_contract.stubs import build_stubs, compile_library, find_missing, system_libraries


def make_package(site_packages: Path) -> None:
    """A torch_npu that needs torch, the C library and CANN."""
    torch_lib = site_packages / "torch" / "lib"
    npu_lib = site_packages / "torch_npu" / "lib"
    torch_lib.mkdir(parents=True)
    npu_lib.mkdir(parents=True)
    compile_library("int of_torch(void) { return 1; }", torch_lib / "libtorch.so")
    source = (
        "int of_torch(void); int aclInit(void); double sin(double);"
        "int own(void) { return 2; } int use(double x) { return of_torch() + aclInit() + sin(x); }"
    )
    compile_library(source, npu_lib / "libtorch_npu.so")
    compile_library(
        "int own(void); int aclFree(void); int more(void) { return own() + aclFree(); }",
        site_packages / "torch_npu" / "_C.so",
    )


def test_only_what_nobody_defines_is_missing(tmp_path: Path) -> None:
    make_package(tmp_path)
    needing = [tmp_path / "torch_npu/lib/libtorch_npu.so", tmp_path / "torch_npu/_C.so"]
    providers = [*needing, tmp_path / "torch/lib/libtorch.so", *system_libraries()]
    assert find_missing(needing, providers) == ["aclFree", "aclInit"]


def test_the_stubs_make_the_package_loadable(tmp_path: Path) -> None:
    make_package(tmp_path)
    target = tmp_path / "stubs"
    target.mkdir()
    build_stubs(tmp_path, target)
    assert {path.name for path in target.iterdir()} == {
        "libascendcl.so",
        "libhccl.so",
        "libacl_op_compiler.so",
        "libacl_tdt_channel.so",
        "libge_runner.so",
        "libgraph.so",
    }
    stub = ctypes.CDLL(str(target / "libascendcl.so"))
    assert stub.aclInit() == stub.aclFree() == 0
    assert not hasattr(stub, "of_torch")
