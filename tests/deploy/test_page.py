"""The commands of docs/hosts.md, as they stand there, on this machine: with Ray, PostgreSQL and Redis.

What is changed of them: addresses and passwords where the page has dots, Ray's ports and directory, and of the YAML
what asks for a model, GPUs and more processors than there are. Ray lets a front go after 5 s and not after 30.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from tests.conversations.postgres import cluster as postgres_cluster
from tests.limits import ROOT, SECONDS, join_all, until
from tests.redis_server import redis_server

pytestmark = pytest.mark.long

PAGE = (ROOT / "docs" / "hosts.md").read_text(encoding="utf-8")
KEY = "a key that clients send"
HEADERS = {"authorization": f"Bearer {KEY}"}
ASK = {"model": "my-model", "prompt": "The house stood by the river, and", "temperature": 0, "ignore_eos": True}


def block() -> list[str]:
    """The commands of the page's first section."""
    section = PAGE.partition("## Start")[2].partition("\n## ")[0]
    return [line.strip().partition("   #")[0].rstrip() for line in section.splitlines() if line.startswith("    ")]


def variables(**known: str) -> dict[str, str]:
    """What the page exports; of its dots, what is `known`."""
    found = {}
    for line in block():
        if line.startswith("export "):
            for word in shlex.split(line.removeprefix("export ")):
                name, _, value = word.partition("=")
                found[name] = known[name] if "..." in value else value
    return found


def command(name: str) -> list[str]:
    """The page's command that begins so."""
    (line,) = (line for line in block() if line.startswith(name))
    return shlex.split(line)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


class Shell:
    """An operator's shell: commands of the page run in its environment, and what they start ends with it."""

    def __init__(self, environment: Mapping[str, str], directory: Path) -> None:
        programs = str(Path(sys.executable).parent)
        self.directory = directory
        path = os.pathsep.join([programs, os.environ["PATH"]])
        python = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.environment = {**os.environ, **environment, "PATH": path, "PYTHONPATH": python, "HOME": str(directory)}

    def run(self, *words: str) -> str:
        """A command that ends."""
        done = subprocess.run(
            words, env=self.environment, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @contextmanager
    def keep(self, *words: str) -> Iterator[subprocess.Popen[bytes]]:
        """A command that stays."""
        log = (self.directory / f"{len(list(self.directory.iterdir()))}.log").open("wb")
        process = subprocess.Popen(words, env=self.environment, cwd=ROOT, stdout=log, stderr=log)
        try:
            yield process
        finally:
            started = []
            if process.poll() is None:
                root = psutil.Process(process.pid)
                started = [root, *root.children(recursive=True)]
            process.send_signal(signal.SIGTERM)
            _, left = psutil.wait_procs(started, SECONDS / 4)
            for one in left:
                with suppress(psutil.NoSuchProcess):  # it may end just now
                    one.kill()
            process.wait(SECONDS)
            log.close()

    def end(self) -> None:
        """End what has left its parents, as HAProxy does when it reads its configuration anew: its home tells it."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("HOME") == str(self.directory):
                    process.kill()


def prepared(directory: Path, port: int, **args: Any) -> str:
    """deploy/ray/serve.yaml for a machine with two cores and no GPU."""
    config = yaml.safe_load((ROOT / "deploy" / "ray" / "serve.yaml").read_text(encoding="utf-8"))
    config["http_options"] |= {"host": "127.0.0.1", "port": port}
    config["proxy_location"] = "HeadOnly"  # both of Ray's hosts are this one, with one port
    (application,) = config["applications"]
    del application["args"]["model"]
    small = {"kv_cache_memory_bytes": 64 << 20, "num_threads": 1, "dtype": "float32", "device": "cpu"}
    application["args"] |= {**small, "kv_offloading_size": 0.05, "kv_remote_size": 0.2, **args}
    for deployment in application["deployments"]:
        if deployment["name"] == "Engine":
            deployment["ray_actor_options"] = {"num_cpus": 1}
    path = directory / "serve.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path)


@pytest.fixture(scope="module")
def shell() -> Iterator[Shell]:
    with ExitStack() as ending:
        directory = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="cellar-page-", dir="/tmp")))
        database, cache = ending.enter_context(postgres_cluster()), ending.enter_context(redis_server())
        environment = variables(
            RAY_AUTH_TOKEN=os.urandom(32).hex(),
            CELLAR_API_KEY=KEY,
            CELLAR_CONVERSATION_STORE=database.url,
            CELLAR_KV_REMOTE=cache.url,
            CELLAR_KV_REMOTE_KEY=os.urandom(32).hex(),
        )
        environment |= {
            "OMP_NUM_THREADS": "1",
            "RAY_prestart_worker_first_driver": "0",  # a process for each CPU otherwise, all of them at once
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",
        }
        shell = Shell(environment, directory)
        ending.callback(shell.end)
        yield shell


def test_the_page_names_what_there_is() -> None:
    assert [words[:2] for words in map(shlex.split, block()) if words[0] != "export"] == [
        ["ray", "start"],
        ["ray", "start"],
        ["serve", "deploy"],
    ]
    assert command("serve deploy") == ["serve", "deploy", "deploy/ray/serve.yaml"]


@pytest.mark.timeout(400)  # 170 s on two cores
def test_start_deploy_upgrade_and_drain(shell: Shell) -> None:
    """Two of Ray's hosts on this one; streams go on through an upgrade and a drain to the tokens of before."""
    gcs, dashboard, port = free_port(), free_port(), free_port()
    head = [*command("ray start --head"), f"--port={gcs}", f"--dashboard-port={dashboard}", "--num-cpus=6"]
    more = [f"--ray-client-server-port={free_port()}", f"--temp-dir={shell.directory}/ray", "--block"]
    shell.environment["RAY_DASHBOARD_ADDRESS"] = shell.environment["RAY_API_SERVER_ADDRESS"] = (
        f"http://127.0.0.1:{dashboard}"
    )
    address = socket.gethostbyname(socket.gethostname())
    with shell.keep(*head, *more, f"--node-ip-address={address}"):
        until(lambda: answers(f"http://127.0.0.1:{dashboard}/api/version", shell))
        shell.environment["RAY_ADDRESS"] = f"{address}:{gcs}"
        (joining,) = [word.replace("HEAD:6379", f"{address}:{gcs}") for word in command("ray start --address")[2:]]
        with shell.keep("ray", "start", joining, "--num-cpus=6", "--block"):
            until(lambda: len(nodes(shell)) == 2)
            url = f"http://127.0.0.1:{port}"
            shell.run(*command("serve deploy")[:-1], prepared(shell.directory, port))
            until(lambda: is_running(shell), 1.5 * SECONDS)  # all of Ray's processes start at once
            assert httpx.get(f"{url}/v1/models", timeout=SECONDS).status_code == 401
            conversation = post(url, "/v1/conversations", {})["id"]
            turn = {"model": "my-model", "conversation": conversation, "max_output_tokens": 16, "temperature": 0}
            assert post(url, "/v1/responses", {**turn, "input": "There was a house."})["status"]
            with streaming(url):
                shell.run(*command("serve deploy")[:-1], prepared(shell.directory, port, max_num_seqs=200))
                until(lambda: is_running(shell))
            assert yaml.safe_load(shell.run("serve", "status"))["applications"]["cellar"]["status"] == "RUNNING"
            (other,) = (node for node, is_head in nodes(shell).items() if not is_head)
            assert other in shell.run("ray", "list", "nodes")
            with streaming(url):
                shell.run(*drain(other))
                until(lambda: other not in nodes(shell) or not busy(shell, other))
            items = httpx.get(f"{url}/v1/conversations/{conversation}/items", headers=HEADERS, timeout=SECONDS).json()
            assert len(items["data"]) == 2, "what was asked, and the answer"


def drain(node: str) -> list[str]:
    """The page's command."""
    found = re.search(r"`(ray drain-node [^`]*)`", PAGE)
    assert found is not None
    return shlex.split(found[1].replace("--node-id ID", f"--node-id {node}"))


def answers(url: str, shell: Shell) -> bool:
    """Whether anybody is there; Ray's dashboard wants its token."""
    try:
        httpx.get(url, timeout=SECONDS)
    except httpx.TransportError:
        return False
    return True


def told(shell: Shell, path: str) -> Any:
    """What Ray's dashboard says. `ray list` and `serve status` ask it the same, as processes of seconds each."""
    address, token = shell.environment["RAY_DASHBOARD_ADDRESS"], shell.environment["RAY_AUTH_TOKEN"]
    time.sleep(0.2)  # who waits asks again at once
    answer = httpx.get(f"{address}{path}", headers={"authorization": f"Bearer {token}"}, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    return answer.json()


def listed(shell: Shell, what: str) -> list[dict[str, Any]]:
    """What Ray has of these."""
    found: list[dict[str, Any]] = told(shell, f"/api/v0/{what}?limit=1000")["data"]["result"]["result"]
    return found


def nodes(shell: Shell) -> dict[str, bool]:
    """Ray's hosts that live, and which is the head."""
    return {node["node_id"]: node["is_head_node"] for node in listed(shell, "nodes") if node["state"] == "ALIVE"}


def busy(shell: Shell, node: str) -> bool:
    """Whether engines or fronts run there."""
    return any(
        actor["node_id"] == node and actor["state"] == "ALIVE" and "ServeReplica" in actor["class_name"]
        for actor in listed(shell, "actors")
    )


def is_running(shell: Shell) -> bool:
    """Whether all of the application is as its YAML says."""
    (application,) = told(shell, "/api/serve/applications/")["applications"].values()
    assert "FAILED" not in application["status"], application
    states = [one["status"] for one in application["deployments"].values()]
    return application["status"] == "RUNNING" and set(states) == {"HEALTHY"}


def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{url}{path}", json=body, headers=HEADERS, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@contextmanager
def streaming(url: str) -> Iterator[None]:
    """Completions all the time, all of them the same and none refused."""
    expected = post(url, "/v1/completions", {**ASK, "max_tokens": 200})["choices"][0]["text"]
    ended = threading.Event()
    wrong: list[str] = []

    def ask() -> None:
        while not ended.is_set():
            try:
                text = post(url, "/v1/completions", {**ASK, "max_tokens": 200})["choices"][0]["text"]
            except (AssertionError, httpx.HTTPError) as error:
                wrong.append(repr(error))
                return
            if text != expected:
                wrong.append(text)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        join_all(threads)
    assert not wrong
