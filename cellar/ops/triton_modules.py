"""Launchers of Triton, small modules in C that all have one name, each as a module of its own.

CPython has one object for all modules of a name that it loads a second time from their files, and writes the newest
one's functions into it. Two kernels with arguments of the same types share a file; so while several threads prepare
kernels, one of them may be given another's launcher. If it takes as many arguments, nobody notices but the results.
"""

from __future__ import annotations

import threading
from types import ModuleType

_LOCK = threading.Lock()


def keep_apart() -> None:
    """From now on what Triton loads is a module of its own; a second call changes nothing."""
    from triton.runtime import build

    with _LOCK:
        shared = getattr(build, "_load_module_from_path", None)  # of Triton 3.6; what other versions do is not known
        if shared is None or getattr(shared, "keeps_apart", False):
            return

        def load(name: str, path: str) -> ModuleType:
            with _LOCK:
                own = ModuleType(name)
                own.__dict__.update(vars(shared(name, path)))
                return own

        load.keeps_apart = True  # type: ignore[attr-defined]
        build._load_module_from_path = load
