"""What tests of several folders use."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterator

import pytest
import torch

from tests.thinned import thin

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # a machine where tests marked `gpu` run may lack it
    pass
else:  # how long an example takes says nothing on a busy machine
    anywhere = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    # A change is judged by the same examples as the one before it; new ones are sought by --hypothesis-profile=hunt.
    settings.register_profile("same", anywhere, derandomize=True, database=None)
    settings.register_profile("hunt", anywhere)
    settings.load_profile("same")

# A job in a shell's background ignores Ctrl-C, and so do all that it starts; some tests press it.
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection() -> None:
    """What modules and tests are made of stays: a collector that walks through it takes a sixth of these seconds."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Nor is there anything in it for the collections that tests and servers ask for."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before `-m` chooses."""
    thin(items)


@pytest.fixture(autouse=True, scope="session")
def data_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What servers keep lies in a directory of this run, those of child processes included."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch computes with one thread: more would wait for each other beside other tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
