"""A user's file of models of cells, for `cellar serve --cells FILE.py`."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from cellar.cells import CellModel
from cellar.core.errors import CellarError, ConfigError


def load_models(path: Path) -> list[CellModel]:
    """Run a Python file and collect every `CellModel` among its names, or in lists and tuples of these.

    The file may import its neighbours. Raises ConfigError for a file that cannot be run, or has no model.
    """
    if not path.is_file():
        raise ConfigError(f"{path} is not there; --cells takes a Python file that makes CellModels.")
    name = path.stem if path.stem.isidentifier() and path.stem not in sys.modules else f"cellar_cells_{abs(hash(path))}"
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file; its name must end in .py.")
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and type hints of the file look themselves up here
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except CellarError as error:
        raise ConfigError(f"{path}: {error}") from error
    except Exception as error:
        line = _line(error, str(path))
        raise ConfigError(f"{path}{line} raised {type(error).__name__}: {error}; fix the file.") from error
    found: list[CellModel] = []
    for value in vars(module).values():
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(one, CellModel) and one not in found:
                found.append(one)
    if not found:
        raise ConfigError(f"{path} makes no CellModel; put one in a variable, such as model = CellModel(...).")
    return found


def _line(error: Exception, path: str) -> str:
    """`:LINE` of the file's own line that raised, if there is one."""
    if isinstance(error, SyntaxError):
        return f":{error.lineno}"
    trace, found = error.__traceback__, ""
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == path:
            found = f":{trace.tb_lineno}"
        trace = trace.tb_next
    return found
