"""Optional packages: what to type when one is missing, in a checkout and where a wheel was installed."""

from __future__ import annotations

import os
import shlex
import sys
from importlib import metadata
from pathlib import Path

from cellar.core.errors import ConfigError

DISTRIBUTION = "cellar-llm"


def missing(what: str, package: str | None, extra: str) -> ConfigError:
    """The error of a part of Cellar whose packages are not installed; `what` begins it: "serving needs"."""
    return ConfigError(f"{what} the package {package}, which is not installed; run {command(extra)}")


def command(extra: str) -> str:
    """What installs the packages of an extra into the environment that runs."""
    root = Path(__file__).parent.parent.parent
    if (root / "scripts" / "setup").is_file() and Path(sys.prefix).resolve() == (root / ".venv").resolve():
        place = os.path.relpath(root)
        return f"{'' if place == '.' else shlex.quote(place) + '/'}scripts/setup {extra}"
    return " ".join(["python -m pip install", *map(shlex.quote, packages(extra))])


def packages(extra: str) -> list[str]:
    """The requirements of an extra by their own names: no index has to know ours."""
    try:
        requirements = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # run from sources that nobody installed
        return [f"{DISTRIBUTION}[{extra}]"]
    split = (requirement.partition(";") for requirement in requirements)
    return [name.strip() for name, _, marker in split if f'extra == "{extra}"' in marker.replace("'", '"')]
