"""Launchers are not each other's, whoever loads which of them when."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
import threading
from pathlib import Path
from typing import Any

import pytest

from cellar.ops.triton_modules import keep_apart
from tests.limits import join_all

pytest.importorskip("triton")
HEADERS = Path(sysconfig.get_paths()["include"])

SOURCE = """
#include <Python.h>
static PyObject *number(PyObject *self, PyObject *none) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"number", number, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "launcher_of_a_test", NULL, -1, methods};
PyMODINIT_FUNC PyInit_launcher_of_a_test(void) { return PyModule_Create(&module); }
"""


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Modules of one name whose numbers are 0, 1 and 2."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or not (HEADERS / "Python.h").exists():
        pytest.skip("modules in C need a compiler and Python's headers")
    found = []
    for k in range(3):
        folder = tmp_path_factory.mktemp(f"module{k}")
        (folder / "m.c").write_text(SOURCE % k)
        library = folder / "m.so"
        command = [compiler, "-shared", "-fPIC", f"-I{HEADERS}", "-o", str(library), str(folder / "m.c")]
        subprocess.run(command, check=True)
        found.append(str(library))
    return found


def load(path: str) -> Any:
    from triton.runtime import build

    return build._load_module_from_path("launcher_of_a_test", path)


def test_a_module_stays_what_it_was_when_another_is_loaded(paths: list[str]) -> None:
    keep_apart()
    once = [load(path) for path in paths]
    again = [load(path) for path in paths]
    assert [module.number() for module in (*once, *again)] == [0, 1, 2] * 2


def test_threads_that_load_at_once_have_their_own(paths: list[str]) -> None:
    keep_apart()
    wrong: list[tuple[int, int]] = []

    def read(k: int) -> None:
        for _ in range(2000):
            found = load(paths[k]).number()
            if found != k:
                wrong.append((k, found))

    threads = [threading.Thread(target=read, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    join_all(threads)
    assert not wrong


def test_it_is_done_once() -> None:
    from triton.runtime import build

    keep_apart()
    loading = build._load_module_from_path
    keep_apart()
    assert build._load_module_from_path is loading
