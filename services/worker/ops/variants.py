"""The builds of the C kernels: one per instruction set, best first."""

import platform
import re
from dataclasses import dataclass
from pathlib import Path

SOURCE_DIR = Path(__file__).parent / "csrc"
OUTPUT_DIR = Path(__file__).parent / "_native"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A set of compiler options and the CPU flags a machine needs to run the result."""

    name: str
    options: tuple[str, ...]
    flags: frozenset[str]
    machines: frozenset[str] | None
    """Machine names the options exist for; None for all."""

    @property
    def is_buildable(self) -> bool:
        """Whether this machine's compiler knows the options."""
        return self.machines is None or platform.machine() in self.machines


_X86 = frozenset({"x86_64"})
VARIANTS = (
    Variant(
        name="avx512bf16",
        options=(
            "-march=x86-64-v4",
            "-mavx512bf16",
            "-mavx512vnni",
            "-mprefer-vector-width=512",
        ),
        flags=frozenset(
            {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni"}
        ),
        machines=_X86,
    ),
    Variant(
        name="avx2",
        options=("-march=x86-64-v3",),
        flags=frozenset({"avx2", "fma", "bmi2"}),
        machines=_X86,
    ),
    Variant(name="portable", options=(), flags=frozenset(), machines=None),
)


def library_path(variant: Variant) -> Path:
    """Where a build's shared library lies."""
    return OUTPUT_DIR / f"glm_{variant.name}.so"


def cpu_flags() -> frozenset[str]:
    """Instruction set flags as Linux names them; empty where it does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset(found.group(1).split()) if found else frozenset()
