"""`scripts/walks` follows a request through the tree that is here: it is our own server that it must get past."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.long
def test_the_three_ways_are_walked() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/walks"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=280
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == {"chat", "chunk", "cell", "turn"}
    for way in ("chat", "chunk", "cell"):
        assert 0 < found[way]["files"] < found[way]["entered"] < found[way]["lines"]
    assert 1 < found["turn"]["files"] <= found["turn"]["moves"]
