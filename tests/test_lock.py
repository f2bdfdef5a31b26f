"""Locks of deploy/: exact versions with hashes of all that a container installs beside torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
LOCKS = {"requirements.lock": ("server",), "requirements-ray.lock": ("server", "postgres", "redis", "ray")}

every_lock = pytest.mark.parametrize("file", LOCKS)


def text(file: str) -> str:
    return (ROOT / "deploy" / file).read_text()


def locked(file: str) -> dict[str, Version]:
    found = re.findall(r"^([a-z0-9.-]+)==(\S+) \\$", text(file), flags=re.MULTILINE)
    return {name: Version(version) for name, version in found}


@every_lock
def test_every_dependency_of_the_server_is_locked_within_its_bounds(file: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"]]
    asked += [line for extra in LOCKS[file] for line in project["optional-dependencies"][extra]]
    versions = locked(file)
    for requirement in map(Requirement, asked):
        if requirement.name in ("torch", "cellar-llm") or (requirement.marker and not requirement.marker.evaluate()):
            continue
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        assert name in versions, f"{name} is not in the lock; run scripts/lock"
        assert requirement.specifier.contains(versions[name]), f"{name} {versions[name]}; run scripts/lock"


@every_lock
def test_every_package_has_hashes_and_none_is_a_build_of_torch(file: str) -> None:
    entries = re.split(r"(?m)^(?=[a-z0-9])", text(file))[1:]
    assert len(entries) == len(locked(file)) > 30
    for entry in entries:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}$", entry, flags=re.MULTILINE), entry
        assert not re.match(r"(torch|triton|nvidia-)", entry)


def test_the_container_installs_what_is_locked() -> None:
    steps = (ROOT / "deploy" / "Dockerfile").read_text()
    assert "ARG LOCK=requirements.lock" in steps
    assert '--require-hashes --requirement "${LOCK}"' in steps
    assert "pip install --no-cache-dir --no-deps --no-build-isolation ." in steps
    assert all(f"deploy/{file}" in steps for file in LOCKS)


BASE = f"python:3.11-slim@sha256:{'0' * 64}"


def noted(dist: Path, base: str = BASE) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "release-notes"), "--base", base, "--dist", str(dist)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_release_notes_tell_what_the_container_holds(tmp_path: Path) -> None:
    """With files as scripts/audit writes them; asking for vulnerabilities needs a network."""
    packages: list[dict[str, Any]] = [
        {"name": name, "version": str(version)} for name, version in locked("requirements.lock").items()
    ]
    assert "run scripts/audit" in noted(tmp_path).stderr
    (tmp_path / "sbom.json").write_text(json.dumps({"components": packages}))
    (tmp_path / "audit.json").write_text(json.dumps({"dependencies": [{**one, "vulns": []} for one in packages]}))
    done = noted(tmp_path)
    assert done.returncode == 0, done.stderr
    assert BASE in done.stdout
    assert f"{len(packages)} packages" in done.stdout
    assert "(unreleased)" in done.stdout or "## " in done.stdout
    assert "no digest" in noted(tmp_path, "python:3.11-slim").stderr
    spoilt = [{**one, "vulns": [{"id": "X-1"}]} for one in packages]
    (tmp_path / "audit.json").write_text(json.dumps({"dependencies": spoilt}))
    bad = noted(tmp_path)
    assert bad.returncode != 0
    assert f"{packages[0]['name']} (X-1)" in bad.stderr
    (tmp_path / "sbom.json").write_text(json.dumps({"components": packages[1:]}))
    assert "not of the packages that are locked now" in noted(tmp_path).stderr
