"""Compiles the C kernels: ``python -m services.worker.ops.build``.

One shared library per instruction set that this machine's compiler knows; `native.load` picks the
best one the CPU runs, so libraries may be built on one machine and used on another.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from services.worker.ops import variants
from services.worker.ops.variants import SOURCE_DIR, VARIANTS, Variant, library_path

_OPTIONS = (
    "-std=gnu11",
    "-O3",
    "-fPIC",
    "-fopenmp-simd",
    "-pthread",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
)
_UNITS = {
    "bf16": ("kernels.c", "-DELEM_BF16"),
    "f32": ("kernels.c",),
    "pool": ("pool.c",),
    "replay": ("replay.c",),
}


class BuildError(Exception):
    """No compiler, or it refused the sources."""


def build(variant: Variant, compiler: str) -> Path:
    """Compile one variant; the library appears whole or not at all."""
    target = library_path(variant)
    target.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = []
        for name, (source, *defines) in _UNITS.items():
            objects.append(str(Path(scratch) / f"{name}.o"))
            options = (*_OPTIONS, *variant.options, *defines)
            _run(compiler, *options, "-c", str(SOURCE_DIR / source), "-o", objects[-1])
        library = Path(scratch) / target.name
        _run(compiler, "-shared", "-pthread", *objects, "-lm", "-o", str(library))
        library.replace(target)
    return target


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise BuildError(f"{' '.join(command)}\n{result.stderr}")


def is_current(variant: Variant) -> bool:
    """Whether a variant was built after its sources last changed."""
    target = library_path(variant)
    inputs = (*SOURCE_DIR.iterdir(), Path(__file__), Path(variants.__file__))
    return target.exists() and target.stat().st_mtime > max(
        source.stat().st_mtime for source in inputs
    )


def build_all() -> list[Path]:
    """Compile every variant this machine can and that is not current."""
    compiler = shutil.which(os.environ.get("CC", "gcc"))
    if compiler is None:
        raise BuildError("no C compiler: install gcc, or set CC")
    built = []
    for variant in VARIANTS:
        if not variant.is_buildable:
            continue
        try:
            built.append(library_path(variant) if is_current(variant) else build(variant, compiler))
        except BuildError as error:
            if not variant.flags:
                raise
            # An old compiler may not know an instruction set; slower builds still serve.
            sys.stderr.write(f"the {variant.name} kernels are left out: {error}\n")
    return built


def main() -> int:
    """Build, and say what was built."""
    try:
        built = build_all()
    except BuildError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.writelines(f"{path}\n" for path in built)
    return 0


if __name__ == "__main__":
    sys.exit(main())
