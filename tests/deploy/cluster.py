"""A Ray cluster on this machine with Cellar on it, kept by a program of its own: `python -m tests.deploy.cluster`.

Ray reads its options from the environment when it is imported, so it is not imported by the tests themselves.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from cellar.server.serving import listen_beside
from tests.limits import ROOT, SECONDS, until

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",  # 30 s otherwise, for load balancers that are slow to hear
    "RAY_prestart_worker_first_driver": "0",  # a process for each CPU otherwise, all of them at once
    "OMP_NUM_THREADS": "1",
}
STATUS = "cellar: "
"""Begins the driver's answer to what it was to deploy."""

DEPLOY_SECONDS = 900.0
"""To start all of it; each of its dozen processes loads Python anew, on a machine that others use."""

MEMORY = 100 * 2**20
"""Of Ray's object store, through which nothing of Cellar's goes."""


class Cluster:
    """A cluster, with an application of any number of engines and fronts at `url`.

    `existing` is the address of a cluster that others have started, `within` a command that begins another one, where
    it lies, and `host` an address there.
    """

    def __init__(
        self,
        directory: Path,
        environment: Mapping[str, str],
        host: str = "127.0.0.1",
        within: Sequence[str] = (),
        existing: str = "local",
    ) -> None:
        # Ours as long as the cluster lives: HAProxy listens beside a socket that is bound and does not listen.
        self._place: socket.socket = listen_beside("127.0.0.1", 0)
        self.port = self._place.getsockname()[1]
        self.url = f"http://{host}:{self.port}"
        self._within = within
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self._path = directory / "driver.log"
        self._log = self._path.open("w")
        self._driver = subprocess.Popen(
            [*within, sys.executable, "-m", "tests.deploy.cluster", str(directory), existing],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path, **environment},
            start_new_session=True,
        )

    def deploy(
        self, args: Mapping[str, Any], engine: Mapping[str, Any] | None = None, front: Mapping[str, Any] | None = None
    ) -> None:
        """Deploy, and wait until all of it runs. `engine` and `front` are what a YAML may say of a deployment."""
        config = {
            "proxy_location": "HeadOnly",
            # In a network of its own everywhere, as HAProxy calls fronts of its host at 127.0.0.1.
            "http_options": {
                "host": "0.0.0.0" if self._within else "127.0.0.1",
                "port": self.port,
                "keep_alive_timeout_s": 3600,  # as in the manifests
            },
            "applications": [
                {
                    "name": "cellar",
                    "route_prefix": "/",
                    "import_path": "cellar.deploy.ray:app",
                    "args": dict(args),
                    "deployments": [{"name": "Engine", **(engine or {})}, {"name": "Front", **(front or {})}],
                }
            ],
        }
        assert self._driver.stdin is not None
        assert self._driver.stdout is not None
        self._driver.stdin.write(json.dumps(config) + "\n")
        self._driver.stdin.flush()
        for said in self._driver.stdout:  # Ray itself says this and that
            if said.startswith(STATUS):
                assert said.removeprefix(STATUS).strip() == "RUNNING", self.log()
                return
        raise AssertionError(self.log())

    def http(self) -> httpx.Client:
        """A client."""
        return httpx.Client(base_url=self.url, timeout=SECONDS)

    def engines(self) -> list[int]:
        """The processes of the engines."""
        found = []
        for actor in self.actors("Engine"):
            with suppress(psutil.Error):
                found += [one.pid for one in actor.children() if "spawn_main" in " ".join(one.cmdline())]
        return found

    def actors(self, deployment: str) -> list[psutil.Process]:
        """The processes of a deployment's replicas."""
        title, found = f"ray::ServeReplica:cellar:{deployment}", []
        for process in psutil.Process(self._driver.pid).children(recursive=True):
            with suppress(psutil.Error):
                found += [process] if process.cmdline() and process.cmdline()[0].startswith(title) else []
        return found

    def log(self) -> str:
        """What the driver has said."""
        return self._path.read_text()[-4000:]

    def close(self) -> None:
        """End all of it."""
        started = psutil.Process(self._driver.pid).children(recursive=True)
        assert self._driver.stdin is not None
        self._driver.stdin.close()
        try:
            self._driver.wait(SECONDS)
        finally:
            for process in started:
                with suppress(psutil.Error):
                    process.kill()
            self._driver.kill()
            self._driver.wait()
            self._place.close()
            self._log.close()


@contextmanager
def cluster(**environment: str) -> Iterator[Cluster]:
    """A cluster, gone afterwards; the environment is every process's there."""
    with tempfile.TemporaryDirectory(prefix="cellar-ray-") as directory:
        made = Cluster(Path(directory), environment)
        try:
            yield made
        finally:
            made.close()
            until(lambda: not [one for one in psutil.process_iter() if one.ppid() == made._driver.pid])


def main(directory: str, existing: str) -> None:
    """Deploy what each line of the input says; ends with the input."""
    import time

    import ray
    from ray import serve
    from ray.serve.schema import ServeDeploySchema

    if existing == "local":  # never one that happens to run here
        # Of CPUs more than deployments ask for.
        own = {"num_cpus": 12, "include_dashboard": False, "object_store_memory": MEMORY, "_temp_dir": directory}
        ray.init("local", log_to_driver=False, **own)
    else:
        ray.init(existing, log_to_driver=False)
    for line in sys.stdin:
        config = ServeDeploySchema(**json.loads(line))
        serve.start(http_options=config.http_options.model_dump(), proxy_location=config.proxy_location.value)
        client = serve.context._get_global_client()  # as `serve run FILE` does it
        client.deploy_apps(config)
        end = time.monotonic() + DEPLOY_SECONDS
        status = "DEPLOYING"
        while time.monotonic() < end and status not in ("DEPLOY_FAILED", "UNHEALTHY"):
            time.sleep(0.1)
            application = serve.status().applications.get("cellar")
            status = "DEPLOYING" if application is None else application.status.value
            if status == "RUNNING":
                break
        print(STATUS + status, flush=True)
        if application is not None and status != "RUNNING":
            print(application.message, application.deployments, file=sys.stderr, flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
