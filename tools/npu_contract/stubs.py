"""Stand-ins for the CANN libraries that torch_npu links to.

The wheel imports beside torch if every symbol it needs is found. None of them is called before a
device is opened, so a function that returns 0 will do for each.
"""

from __future__ import annotations

import re
import subprocess
import sysconfig
from pathlib import Path

EMPTY = ("libhccl", "libacl_op_compiler", "libacl_tdt_channel", "libge_runner", "libgraph")
FULL = "libascendcl"
_SYSTEM = r"(?:libc|libm|libdl|libpthread|librt|libgcc_s|libstdc\+\+)\.so\.\d+ .*=> (\S+)"
# Python's, the compiler's and the C++ runtime's own names come from elsewhere.
_WANTED = r"(?!_?Py|__|_ITM)[A-Za-z_]\w*"


def build_stubs(site_packages: Path, target: Path) -> None:
    """Write the stub libraries for the torch_npu in `site_packages` into `target`."""
    package = site_packages / "torch_npu"
    libraries = [*package.glob("lib/*.so"), *package.glob("_C*.so")]
    providers = [*libraries, *(site_packages / "torch" / "lib").glob("*.so*"), *system_libraries()]
    names = find_missing(libraries, providers)
    source = "".join(f"long {name}(void) {{ return 0; }}\n" for name in names)
    compile_library(source, target / f"{FULL}.so")
    for name in EMPTY:
        compile_library("", target / f"{name}.so")


def find_missing(libraries: list[Path], providers: list[Path]) -> list[str]:
    """Plain symbols that `libraries` need and none of `providers` defines."""
    missing = _symbols("--undefined-only", libraries) - _symbols("--defined-only", providers)
    return sorted(name for name in missing if re.fullmatch(_WANTED, name))


def system_libraries() -> list[Path]:
    """The libraries of C, C++ and Python on this machine."""
    listed = subprocess.run(
        ["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True
    ).stdout
    python = Path(sysconfig.get_config_var("LIBDIR")).glob("libpython3*.so*")
    return [*(Path(path) for path in re.findall(_SYSTEM, listed)), *python]


def compile_library(source: str, target: Path) -> None:
    """Compile C text into a shared library."""
    command = ["gcc", "-w", "-shared", "-fPIC", "-x", "c", "-", "-o", str(target)]
    subprocess.run(command, input=source, text=True, check=True)


def _symbols(which: str, libraries: list[Path]) -> set[str]:
    names: set[str] = set()
    for library in libraries:
        listed = subprocess.run(
            ["nm", "-D", which, str(library)], capture_output=True, text=True, check=False
        ).stdout
        names.update(line.split()[-1].split("@")[0] for line in listed.splitlines() if line)
    return names
