"""A device's context is begun beside imports, by whoever will need one and nobody else."""

from __future__ import annotations

import os
from typing import Any

import pytest

from cellar.core.config import DeviceConfig
from cellar.core.driver import retain_context
from tests.limits import SECONDS


class Driver:
    """Counts two devices, and notes what it is asked."""

    def __init__(self, failing: str = "") -> None:
        self.asked: list[str] = []
        self._failing = failing

    def _answer(self, what: str) -> int:
        self.asked.append(what)
        return 999 if what == self._failing else 0

    def cuInit(self, flags: int) -> int:
        return self._answer("init")

    def cuDeviceGet(self, device: Any, index: int) -> int:
        return self._answer(f"device {index}") if index < 2 else 101

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        return self._answer("context")


def asked(config: DeviceConfig, driver: Driver) -> list[str]:
    thread = retain_context(config, lambda: driver)
    if thread is not None:
        thread.join(SECONDS)
        assert not thread.is_alive()
    return driver.asked


@pytest.mark.parametrize(
    ("device", "index"), [("auto", 0), ("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)], ids=lambda value: str(value)
)
def test_the_context_of_the_device_that_is_asked_for(device: str, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    assert asked(DeviceConfig(device=device), Driver()) == ["init", f"device {index}", "context"]
    assert os.environ["CUDA_MODULE_LOADING"] == "LAZY"


@pytest.mark.parametrize(
    "config",
    [
        DeviceConfig(device="cpu"),
        DeviceConfig(device="cuda", tensor_parallel_size=2),
        DeviceConfig(pipeline_parallel_size=2),
    ],
    ids=["cpu", "ranks", "stages"],
)
def test_who_computes_elsewhere_gets_none(config: DeviceConfig) -> None:
    assert asked(config, Driver()) == []


def test_what_fails_is_left_to_the_library() -> None:
    assert asked(DeviceConfig(), Driver("init")) == ["init"]
    assert asked(DeviceConfig(device="cuda:7"), Driver()) == ["init"]
    assert asked(DeviceConfig(), Driver("context")) == ["init", "device 0", "context"]

    def load() -> Any:
        raise OSError("libcuda.so.1: cannot open shared object file")

    thread = retain_context(DeviceConfig(), load)
    assert thread is not None
    thread.join(SECONDS)
    assert not thread.is_alive()
