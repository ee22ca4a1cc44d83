"""The images and the compose file agree with the services that they start."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from services.launcher.commands import GRPC_SWITCHES, GRPC_VARIABLE
from shared.config import ServiceSettings, parse

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
SETTINGS = {
    "frontend": "FrontendSettings",
    "detokenizer": "DetokenizerSettings",
    "scheduler": "SchedulerSettings",
    "worker": "WorkerSettings",
}


def stages() -> dict[str, str]:
    parts = re.split(r"^FROM \S+ AS (\S+)$", DOCKERFILE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("stage", [*SETTINGS, "worker-npu"])
def test_an_image_starts_its_service_with_flags_that_exist(stage: str) -> None:
    service, body = stage.removesuffix("-npu"), stages()[stage]
    entry = json.loads(re.search(r"^ENTRYPOINT (.*)$", body, re.MULTILINE)[1])  # type: ignore[index]  # must be there
    flags = json.loads(re.search(r"^CMD (.*)$", body, re.MULTILINE)[1])  # type: ignore[index]  # must be there
    assert entry == ["python", "-P", "-m", f"services.{service}"]
    settings_class: type[ServiceSettings] = getattr(
        importlib.import_module(f"services.{service}.settings"), SETTINGS[service]
    )
    settings = parse(settings_class, flags)
    assert f'"{settings.health_address}"' in body.split("HEALTHCHECK")[1].split("ENTRYPOINT")[0]


def test_grpc_is_switched_as_the_launcher_switches_it() -> None:
    line = f"{GRPC_VARIABLE}={GRPC_SWITCHES}\n"
    assert line in stages()["light"]
    assert line in stages()["worker-npu"]


def test_only_workers_install_torch() -> None:
    for name, body in stages().items():
        assert ("[worker" in body) == name.startswith("worker"), name


def test_no_image_names_a_private_registry() -> None:
    bases = re.findall(r"^ARG (?:PYTHON|CANN)_IMAGE=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert bases
    assert all("/" not in base for base in bases)


def test_the_dockerfile_passes_its_linter() -> None:
    linter = Path(sys.executable).parent / "hadolint"
    if not linter.exists():
        pytest.skip("hadolint is not installed")
    subprocess.run([linter, ROOT / "docker" / "Dockerfile"], check=True, timeout=60)


def test_compose_has_every_service_and_publishes_loopback_only() -> None:
    text = (ROOT / "docker" / "compose.yaml").read_text()
    for service in SETTINGS:
        assert f"\n  {service}:\n" in text
        assert f"target: {service}}}" in text
    assert text.count("condition: service_healthy") == 3
    assert re.findall(r'ports: \["(.*?)"\]', text) == ["127.0.0.1:${PORT:-8000}:8000"]
