"""The builds of the compiled kernels."""

from pathlib import Path

import pytest

from services.worker.ops import variants
from services.worker.ops.variants import VARIANTS, cpu_flags, library_path


def test_every_cpu_runs_some_build() -> None:
    assert VARIANTS[-1].flags == frozenset()
    assert VARIANTS[-1].machines is None


def test_builds_do_not_share_a_file() -> None:
    assert len({library_path(variant) for variant in VARIANTS}) == len(VARIANTS)


def test_a_machine_of_another_kind_builds_only_what_its_compiler_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(variants.platform, "machine", lambda: "aarch64")
    assert [variant.name for variant in VARIANTS if variant.is_buildable] == ["portable"]


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("processor : 0\nflags\t\t: fpu avx2 fma\n", {"fpu", "avx2", "fma"}),
        ("processor : 0\nFeatures\t: fp asimd\n", {"fp", "asimd"}),
        ("nothing known\n", set()),
    ],
)
def test_flags_are_read_as_linux_writes_them(
    monkeypatch: pytest.MonkeyPatch, text: str, flags: set[str]
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_args, **_kwargs: text)
    assert cpu_flags() == flags


def test_a_system_that_does_not_say_has_no_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_kwargs: object) -> str:
        raise OSError

    monkeypatch.setattr(Path, "read_text", refuse)
    assert cpu_flags() == frozenset()
