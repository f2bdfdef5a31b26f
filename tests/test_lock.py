"""deploy/requirements.lock: exact versions with hashes of all that the container installs beside torch."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
LOCK = (ROOT / "deploy" / "requirements.lock").read_text()


def locked() -> dict[str, Version]:
    found = re.findall(r"^([a-z0-9.-]+)==(\S+) \\$", LOCK, flags=re.MULTILINE)
    return {name: Version(version) for name, version in found}


def test_every_dependency_of_the_server_is_locked_within_its_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["server"]]
    versions = locked()
    for requirement in map(Requirement, asked):
        if requirement.name == "torch" or (requirement.marker and not requirement.marker.evaluate()):
            continue
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        assert name in versions, f"{name} is not in the lock; run scripts/lock"
        assert requirement.specifier.contains(versions[name]), f"{name} {versions[name]}; run scripts/lock"


def test_every_package_has_hashes_and_none_is_a_build_of_torch() -> None:
    entries = re.split(r"(?m)^(?=[a-z0-9])", LOCK)[1:]
    assert len(entries) == len(locked()) > 30
    for entry in entries:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}$", entry, flags=re.MULTILINE), entry
        assert not re.match(r"(torch|triton|nvidia-)", entry)


def test_the_container_installs_what_is_locked() -> None:
    steps = (ROOT / "deploy" / "Dockerfile").read_text()
    assert "--require-hashes --requirement requirements.lock" in steps
    assert "pip install --no-cache-dir --no-deps --no-build-isolation ." in steps
