"""How many cores this process may use."""

from __future__ import annotations

import os


def num_cores() -> int:
    """Those that the system lets it run on: fewer than the machine's where it is tied to some, by a container, say."""
    allowed = getattr(os, "sched_getaffinity", None)
    return (os.cpu_count() or 1) if allowed is None else len(allowed(0))
