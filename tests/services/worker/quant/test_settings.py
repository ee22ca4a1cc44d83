"""Flags of `glm-mesh quantize`."""

from pathlib import Path

import pytest

from services.worker.quant.settings import QuantizeSettings, read_layers
from shared.config import parse
from shared.errors import ConfigError


def read(*words: str) -> QuantizeSettings:
    return parse(QuantizeSettings, words)


def test_source_and_target_may_stand_before_or_behind_the_flags() -> None:
    for words in (("a", "b", "--scheme", "w8a8"), ("--scheme", "w8a8", "--overwrite", "a", "b")):
        settings = read(*words)
        assert (settings.src, settings.dst) == (Path("a"), Path("b"))
        assert settings.scheme == "w8a8"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("a", "--scheme", "w8a8"), "DST"),
        (("a", "b"), "--scheme is required"),
        (("a", "b", "--scheme", "w4a4"), "--scheme 'w4a4'"),
        (("a", "b", "c", "--scheme", "w8a8"), "c"),
        (("a", "b", "--scheme", "w8a8", "--calibration-tokens", "0"), "--calibration-tokens '0'"),
        (("a", "b", "--scheme", "w8a8", "--max-shard-bytes", "0"), "--max-shard-bytes '0'"),
        (("a", "b", "--scheme", "w8a8", "--calibraton", "x"), "did you mean --calibration"),
    ],
)
def test_a_wrong_flag_is_named(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(*words)


@pytest.mark.parametrize(("source", "target"), [("a", "a"), ("a", "./x/../a"), ("a", "a/b")])
def test_source_and_target_are_apart(source: str, target: str) -> None:
    with pytest.raises(ConfigError, match=r"same directory|inside the other"):
        read(source, target, "--scheme", "w8a8")
    with pytest.raises(ConfigError, match=r"same directory|inside the other"):
        read(target, source, "--scheme", "w8a8")


def test_a_link_to_the_source_is_the_source(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(ConfigError, match="same directory"):
        read(str(tmp_path / "a"), str(tmp_path / "b"), "--scheme", "w8a8")


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("none", frozenset()),
        ("3", frozenset({3})),
        ("0-2,7", frozenset({0, 1, 2, 7})),
        ("auto", None),
    ],
)
def test_layers_are_numbers_and_ranges(text: str, layers: object) -> None:
    settings = read("a", "b", "--scheme", "w8a8c8", "--c8-skip-layers", text)
    assert read_layers(settings.c8_skip_layers) == layers


@pytest.mark.parametrize("text", ["", "x", "4-2", "1,,2", "-1", "0-99999"])
def test_layers_that_are_none_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match="--c8-skip-layers"):
        read("a", "b", "--scheme", "w8a8c8", f"--c8-skip-layers={text}")
