"""`cellar serve` in processes of its own: started, ready, asked for its figures, and gone with all it has started."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO

from prometheus_client.parser import text_string_to_metric_families

from cellar.core.errors import RequestError

READY_SECONDS = 300
STOP_SECONDS = 30
LOG_BYTES = 4000


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is ready."""

    root: str
    model: str
    max_model_len: int


@contextmanager
def running(arguments: Sequence[str]) -> Iterator[Server]:
    """`cellar serve` with these arguments, on a free port; raises RequestError with what it said if it ends early."""
    port = _free_port()
    root = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile() as log:
        command = [sys.executable, "-m", "cellar", "serve", *arguments, "--port", str(port), "--data-dir", directory]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            _wait_until_ready(process, root, log)
            card = json.loads(_get(root + "/v1/models"))["data"][0]
            yield Server(root, card["id"], card["max_model_len"])
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            with suppress(ProcessLookupError):  # whoever of its session is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def counters(root: str) -> dict[str, float]:
    """Cellar's own counters so far, `name{label=value}`."""
    return {
        f"{sample.name.removeprefix('cellar:')}{_labels(sample.labels)}": sample.value
        for family in text_string_to_metric_families(_get(root + "/metrics"))
        if family.type == "counter" and family.name.startswith("cellar:")
        for sample in family.samples
        if sample.name.endswith("_total")
    }


def _labels(labels: Mapping[str, str]) -> str:
    found = ",".join(f"{name}={value}" for name, value in labels.items() if name != "model_name")
    return f"{{{found}}}" if found else ""


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        return str(response.read().decode())


def _wait_until_ready(process: subprocess.Popen[bytes], root: str, log: IO[bytes]) -> None:
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RequestError(f"`cellar serve` ended with status {process.returncode}:\n{_tail(log)}")
        with suppress(OSError):
            _get(root + "/health")
            return
        time.sleep(0.2)
    raise RequestError(f"`cellar serve` was not ready after {READY_SECONDS} s:\n{_tail(log)}")


def _tail(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read()[-LOG_BYTES:].decode(errors="replace")


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
