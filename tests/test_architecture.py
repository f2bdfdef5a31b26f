"""The import table of the architecture, checked by reading every import, and a bound on classes: the gates on shape."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "cellar"

LEAVES = {"version", "py", "__init__", "__main__"}  # anyone may read them

MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "text": {"core"},
    "kv": {"core"},
    "planner": {"core"},
    "conversations": {"core"},
    "schedule": {"core", "kv"},
    "routing": {"core", "kv", "planner"},
    "ops": {"core"},
    "quant": {"core", "ops"},
    "models": {"core", "ops", "quant"},
    "runtime": {"core", "ops", "quant", "models"},
    "cells": {"core", "ops", "models"},
    "demo": set(),
    "engine": {"core", "text", "kv", "schedule", "planner", "routing", "models", "cells", "runtime", "demo"},
    "simulate": {"core", "kv", "schedule", "planner", "routing", "runtime", "engine"},
    "server": {"core", "text", "conversations", "routing", "engine"},
    "deploy": {"core", "engine", "server"},
    "bench": {
        "core",
        "text",
        "kv",
        "planner",
        "conversations",
        "routing",
        "schedule",
        "ops",
        "quant",
        "models",
        "runtime",
        "cells",
        "engine",
        "reports",
        "demo",
    },
    "reports": {
        "core",
        "text",
        "kv",
        "planner",
        "routing",
        "schedule",
        "ops",
        "quant",
        "models",
        "runtime",
        "cells",
        "engine",
        "simulate",
        "bench",
        "demo",
    },
    "cli": {"core", "planner", "conversations", "engine", "server", "bench", "reports", "simulate", "cells", "demo"},
}

# Third-party modules that a package must not touch.
MUST_NOT_IMPORT: dict[str, set[str]] = {
    "core": {"torch", "triton", "time"},
    "text": {"torch", "time"},
    "kv": {"torch", "time"},
    "planner": {"torch", "time"},
    "schedule": {"torch", "time"},
    "routing": {"torch", "time"},
    "conversations": {"torch"},
}
EDGE_ONLY = {"fastapi", "uvicorn", "pydantic", "typer", "matplotlib", "rich"}
EDGE = {"server", "bench", "reports", "cli", "deploy"}
DATABASES = {"sqlalchemy", "alembic", "psycopg"}


def _part(module: str) -> str:
    """`cellar.kv.store` -> `kv`."""
    names = module.split(".")
    return names[1] if len(names) > 1 else "__init__"


@functools.cache
def _nodes(path: Path) -> tuple[ast.AST, ...]:
    """Of those kinds that are looked at here."""
    kinds = (ast.Import, ast.ImportFrom, ast.Global, ast.ClassDef, ast.Constant)
    return tuple(node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds))


def _imports(path: Path) -> Iterator[str]:
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module
            if node.module == "cellar":
                yield from (f"cellar.{alias.name}" for alias in node.names)
            else:
                yield node.module


def _module(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


FILES = sorted(PACKAGE.rglob("*.py"))


def breaches(part: str, imported: str) -> str | None:
    """Why `part` may not import the module `imported`, or None."""
    top = imported.split(".")[0]
    if top == "cellar":
        target = _part(imported)
        if target == part or target in LEAVES:
            return None
        return None if target in MAY_IMPORT[part] else f"{part} must not import {target}"
    if top in MUST_NOT_IMPORT.get(part, set()):
        return f"{part} must not import {top}"
    if top in DATABASES and part != "conversations":
        return f"{top} is for conversations only"
    if top == "ray" and part != "deploy":
        return "ray is for deploy only"
    if top in EDGE_ONLY and part not in EDGE:
        return f"{top} is for {', '.join(sorted(EDGE))} only"
    return None


@pytest.mark.parametrize("path", FILES, ids=_module)
def test_imports_follow_the_table(path: Path) -> None:
    part = _part(_module(path))
    if part in LEAVES:
        part = "cli" if part == "__main__" else "engine"
    assert part in MAY_IMPORT, f"{path}: a new package needs a row in the import table"
    found = [reason for name in _imports(path) if (reason := breaches(part, name))]
    assert not found, f"{path}: {'; '.join(found)}"


def test_the_gate_can_close() -> None:
    assert breaches("schedule", "cellar.runtime.steps.local")
    assert breaches("kv", "torch.nn")
    assert breaches("engine", "typer")
    assert breaches("server", "sqlalchemy")
    assert breaches("server", "ray.serve")
    assert breaches("cli", "cellar.deploy.ray")
    assert breaches("server", "cellar.schedule.steps.scheduler")
    assert not breaches("server", "cellar.engine.llm")


def test_cuda_is_named_only_where_devices_are() -> None:
    """Decisions and models know no vendor; options may name the device."""
    allowed = {"runtime", "ops", "bench", "reports", "core"}
    for path in FILES:
        if _part(_module(path)) in allowed:
            continue
        names = [node.value for node in _nodes(path) if isinstance(node, ast.Constant) and node.value == "cuda"]
        assert not names, f'{path} says "cuda"'


def test_no_ambient_state() -> None:
    for path in FILES:
        assert not any(isinstance(node, ast.Global) for node in _nodes(path)), f"{path} uses global"


MOST_METHODS = 25

LARGER = {
    "cellar.kv.store.KVStore": 36,
    "cellar.kv.conversations.Conversations": 27,
    "cellar.server.pool.pool.Pool": 27,
}
"""Classes that are still to be split, with the methods that they may have until then: the list only gets shorter."""


def test_no_class_has_too_many_methods() -> None:
    methods = {
        f"{_module(path)}.{node.name}": sum(
            isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) for one in node.body
        )
        for path in FILES
        for node in _nodes(path)
        if isinstance(node, ast.ClassDef)
    }
    too_large = {name: n for name, n in methods.items() if n > LARGER.get(name, MOST_METHODS)}
    assert not too_large, f"let several objects own what these classes own: {too_large}"
    split = [name for name in LARGER if methods.get(name, 0) <= MOST_METHODS]
    assert not split, f"no longer larger than others; take them out of the list: {split}"
