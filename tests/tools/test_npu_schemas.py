"""The dump of the wheel's schemas; whether they are the true ones is `make test-npu-contract`."""

import zipfile
from pathlib import Path

import pytest

from services.worker.ops.schemas import SCHEMAS, TORCH_NPU_VERSION
from tools import npu_schemas


def make_wheel(folder: Path, texts: list[str]) -> Path:
    wheel = folder / "torch_npu-1.0-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        library = b"\x7fELF" + b"".join(b"\0" + text.encode() for text in texts) + b"\0end"
        archive.writestr(npu_schemas.LIBRARY, library)
    return wheel


def test_the_dump_covers_the_pinned_operators() -> None:
    assert set(npu_schemas.OPERATORS) == SCHEMAS.keys()


def test_schemas_are_found_between_other_text(tmp_path: Path) -> None:
    texts = ["noise", *SCHEMAS.values(), "npu_swiglu", "npu_swiglu_backward(Tensor x) -> Tensor"]
    assert npu_schemas.find_schemas(make_wheel(tmp_path, texts)) == SCHEMAS


@pytest.mark.parametrize("others", [[], ["npu_swiglu(Tensor x) -> Tensor"]])
def test_a_missing_or_doubtful_schema_is_refused_by_its_name(
    tmp_path: Path, others: list[str]
) -> None:
    kept = [text for name, text in SCHEMAS.items() if name != "npu_swiglu" or others]
    with pytest.raises(SystemExit, match="npu_swiglu: expected one schema"):
        npu_schemas.find_schemas(make_wheel(tmp_path, kept + others))


def test_the_dump_writes_a_module_that_holds_the_schemas() -> None:
    namespace: dict[str, object] = {}
    exec(npu_schemas.render(TORCH_NPU_VERSION, dict(SCHEMAS)), namespace)
    assert namespace["SCHEMAS"] == SCHEMAS
    assert namespace["TORCH_NPU_VERSION"] == TORCH_NPU_VERSION
