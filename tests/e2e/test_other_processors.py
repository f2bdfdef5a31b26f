"""What holds here holds on other processors: the tests that lean on libraries' arithmetic, run as if on those.

Libraries choose kernels by processor, and environment variables make them take this one for a lesser one. They read
them once, so each is a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROCESSORS = {
    "AVX2, two threads": {
        "OMP_NUM_THREADS": "2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c,+bmi,+bmi2",
    },
    "AVX-512 without AMX, one thread": {"OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
}
# Equal answers alone, in company, cold, warm and recomputed; agreement with transformers; formats of weights.
CHOSEN = (
    "tests/ops/test_rows_alone.py",
    "tests/ops/test_linear.py",
    "tests/ops/test_linear_plain.py",
    "tests/quant/test_matrix.py",
    "tests/e2e/test_against_transformers.py",
    "tests/runtime/steps/test_local.py",
)


@pytest.mark.long
@pytest.mark.parametrize("processor", PROCESSORS)
def test_the_same_tests_pass(processor: str) -> None:
    environment = {**os.environ, **PROCESSORS[processor], "GOMP_SPINCOUNT": "0"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not gpu and not long", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, *CHOSEN], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
