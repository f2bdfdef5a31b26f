"""All campaigns against one server, mixed with honest load: `python -m tests.hostile.campaign --minutes 60`.

The server is the whole one (two fronts, an engine's process, two keys) over the fake device, whose right answers are
known. Attackers have one key, honest clients the other. Every process but the first is killed now and then. At the end:
what was answered, lost or wrong, how long honest clients waited, and what each process held over time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.hostile.bodies import FINE, send_spoilt
from tests.hostile.checkpoints import try_many
from tests.hostile.connections import crowd
from tests.hostile.engine_driver import drive
from tests.hostile.grown import grow
from tests.limits import ROOT, SECONDS, join_all, until
from tests.server.served import TEXT, plain

HONEST, HOSTILE = {"x-api-key": "honest-key"}, {"x-api-key": "hostile-key"}
SERVER: dict[str, Any] = {
    "fronts": 2,
    "latency": 0.002,
    "num_rows": 32,
    "num_slots": 1024,
    "limits": {"prepare_timeout": 1.0, "upload_timeout": 5.0, "max_body_bytes": 2**20},
}
PAUSE = 0.2
"""Seconds between an honest client's requests."""
RETURN_SECONDS = 10 * SECONDS
"""A process that was killed is to be there again after so many, on a machine however busy."""
SAY_SECONDS = 60.0
"""What was counted so far is said so often, for whoever ends a campaign."""


@dataclass
class Figures:
    """What honest clients saw. Seconds; a request that was told to come again, or whose server was killed under it, is
    sent again and counted once. It is `lost` if it is not answered within a client's patience while all of the server's
    processes are there: how long a machine takes to start one again is no promise of the server's.
    """

    waits: list[float] = field(default_factory=list)
    again: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    late: int = 0  # answered, but after a client's patience by the clock, since processes were missing
    foreign: int = 0
    failed: Counter[int] = field(default_factory=Counter)


@dataclass
class Held:
    """Of the processes of one kind together, at each look: MiB, descriptors, threads."""

    mebibytes: list[float] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    by_process: dict[int, list[float]] = field(default_factory=dict)
    """MiB of each process, by its id: tells what has grown from what was started again."""


class Whole:
    """Since when all of a server's processes are there; they are at first."""

    def __init__(self) -> None:
        self._since: float | None = time.perf_counter()
        self.away: list[float] = []  # seconds of each time that one was missing

    def broken(self) -> None:
        """One is killed."""
        self._since = None

    def mended(self, away: float) -> None:
        """All are there again, after so many seconds."""
        self.away.append(away)
        self._since = time.perf_counter()

    def seconds(self, begun: float) -> float:
        """How long of the time since `begun`, at the end of it, all were there."""
        return 0.0 if self._since is None else time.perf_counter() - max(begun, self._since)


def honest(
    url: str,
    seed: int,
    go_on: Callable[[int], bool],
    figures: Figures,
    whole: Whole,
    patience: float = SECONDS,
) -> None:
    """Ask for eight tokens again and again; the answer is known."""
    rng, count = random.Random(seed), 0
    with httpx.Client(base_url=url, timeout=SECONDS, headers=HONEST) as http:
        while go_on(count):
            count += 1
            prompt = [rng.randrange(3, 90) for _ in range(rng.randrange(1, 60))]
            body = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True, "temperature": 0}
            begun = sent = time.perf_counter()
            while True:
                try:
                    answer = http.post("/v1/completions", json=body)
                    reason = "503" if answer.status_code == 503 else ""
                except httpx.TransportError as error:
                    reason = type(error).__name__
                if not reason:
                    break
                figures.again[reason] += 1
                if whole.seconds(begun) > patience:
                    figures.lost += 1
                    break
                time.sleep(0.1)
                sent = time.perf_counter()
            if not reason:
                figures.waits.append(time.perf_counter() - sent)
                figures.late += time.perf_counter() - begun > patience
                if answer.status_code != 200:
                    figures.failed[answer.status_code] += 1
                elif answer.json()["choices"][0]["text"] != TEXT.decode(plain(prompt, 8)):
                    figures.foreign += 1
            time.sleep(PAUSE)


@contextlib.contextmanager
def attacked(log: Path, **options: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server as a program whose words go to a file; its process and address. It must end in order."""
    server = {"api_key": "honest-key,hostile-key", "data_dir": str(log.with_suffix(".data"))}
    command = [sys.executable, "-m", "tests.server.fake_process", json.dumps({**SERVER, "server": server, **options})]
    with log.open("w") as words:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=words, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().rpartition(" at ")[2].strip().removesuffix("/v1")
        yield process, url
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0, log.read_text()[-2000:]
    finally:
        process.kill()
        process.wait(SECONDS)


def family(pid: int) -> dict[int, str]:
    """The processes of a server and what each is; those that read templates and grammars are `helper`s."""
    found = {pid: "server"}
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                with contextlib.suppress(OSError):
                    line = Path(f"/proc/{child}/cmdline").read_bytes()
                    stat = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                    if b"expendable" in line:
                        found[child] = "helper"
                    elif b"spawn_main" in line:
                        found |= {k: v for k, v in family(child).items() if k != child}
                        found[child] = "engine" if int(stat[16]) == 0 else "front"  # fronts step back (niceness)
    return found


def look(pid: int, held: dict[str, Held]) -> None:
    """Note what each kind of process holds now."""
    sums: dict[str, list[float]] = {}
    for child, kind in family(pid).items():
        with contextlib.suppress(OSError, ValueError):
            pages = int(Path(f"/proc/{child}/statm").read_text().split()[1])
            files, threads = (len(os.listdir(f"/proc/{child}/{what}")) for what in ("fd", "task"))
            total = sums.setdefault(kind, [0.0, 0, 0])
            mebibytes = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
            for k, value in enumerate((mebibytes, files, threads)):
                total[k] += value
            held.setdefault(kind, Held()).by_process.setdefault(child, []).append(round(mebibytes))
    for kind, (mebibytes, files, threads) in sums.items():
        one = held[kind]
        one.mebibytes.append(round(mebibytes))
        one.descriptors.append(int(files))
        one.threads.append(int(threads))


def kill_now_and_then(
    pid: int, url: str, seed: int, every: float, ending: threading.Event, whole: Whole, killed: Counter[str]
) -> None:
    """SIGKILL to a random process of the server but the first; `killed` counts how many of which kind.

    The next comes when all are there again: with nobody left to answer, who asks would be refused for as long as the
    machine takes to start one. Raises AssertionError if that is longer than RETURN_SECONDS.
    """
    rng = random.Random(seed)
    while not ending.wait(every * (0.5 + rng.random())):
        victims = [(child, kind) for child, kind in family(pid).items() if kind != "server"]
        if not victims:
            continue
        child, kind = rng.choice(victims)
        before, begun = restarts(url), time.perf_counter()
        if kind != "helper":
            whole.broken()
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
            killed[kind] += 1
        if kind != "helper":
            try:
                until(lambda before=before: is_whole(url, before), RETURN_SECONDS)  # type: ignore[misc]
            finally:  # who waits for it need not wait for ever
                whole.mended(time.perf_counter() - begun)


def is_whole(url: str, before: int) -> bool:
    """True if more was started again than `before`, all fronts listen, and each, whoever answers, has an engine."""
    time.sleep(0.2)
    port = f":{int(url.rpartition(':')[2]):04X}"
    sockets = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    if sum(one[1].endswith(port) and one[3] == "0A" for one in sockets) < SERVER["fronts"]:
        return False
    try:
        if restarts(url) <= before:
            return False
        return all(httpx.get(f"{url}/health", timeout=SECONDS).status_code == 200 for _ in range(8 * SERVER["fronts"]))
    except httpx.TransportError:
        return False


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def run(
    seconds: float, seed: int, kill_every: float | None = 20.0, offline: bool = True, rest: float = 0.0
) -> dict[str, Any]:
    """Everything at once for so long; -> the figures. A server that does not end in order is one of the errors.

    Attackers rest so many seconds between two attacks.
    """
    figures, held, ending, whole = Figures(), dict[str, Held](), threading.Event(), Whole()
    statuses, killed, connections = Counter[int | str](), Counter[str](), Counter[str]()
    driven: list[Any] = []
    spoilt: list[tuple[int, list[str]]] = []
    errors: list[BaseException] = []

    def at_its_end(error: BaseException) -> bool:
        """Whether it was the server's end that failed, and not what was counted before."""
        return bool(figures.waits) and isinstance(error, AssertionError | subprocess.TimeoutExpired)

    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        noted(errors, at_its_end),
        attacked(Path(folder) / "log") as (process, url),
    ):
        end = time.monotonic() + seconds

        def go_on(count: int) -> bool:
            return time.monotonic() < end

        def attack_on(count: int) -> bool:
            time.sleep(rest)
            return go_on(count)

        def drive_on() -> None:
            turn = 0
            while attack_on(turn):
                turn += 1
                driven.append(drive(seed + turn, lambda count: count < 400 and attack_on(count)))

        def try_on() -> None:
            turn = 0
            while attack_on(turn):
                time.sleep(5 * rest)
                spoilt.append(try_many(seed + 10 * turn, 10))
                turn += 1

        def kill_on() -> None:
            assert kill_every is not None
            kill_now_and_then(process.pid, url, seed, kill_every, ending, whole, killed)

        def guarded(call: Callable[[], object]) -> Callable[[], None]:
            def caught() -> None:
                try:
                    call()
                except BaseException as error:
                    errors.append(error)

            return caught

        # Alone first: what is usual here and now.
        quiet = Figures()
        honest(url, seed, lambda count: count < 25, quiet, whole)
        works: list[Callable[[], object]] = [
            *(lambda k=k: honest(url, seed + k, go_on, figures, whole) for k in range(3)),
            *(lambda k=k: statuses.update(send_spoilt(url, seed + k, attack_on, HOSTILE)) for k in range(2)),
            lambda: statuses.update(grow(url, seed, attack_on, HOSTILE)),
            lambda: connections.update({"made": crowd(url, seed, attack_on, "x-api-key: hostile-key\r\n")}),
        ]
        works += [kill_on] if kill_every is not None else []
        works += [drive_on, try_on] if offline else []
        threads = [threading.Thread(target=guarded(work), daemon=True) for work in works]
        for thread in threads:
            thread.start()
        told = time.monotonic()
        while go_on(0):
            guarded(lambda: look(process.pid, held))()
            time.sleep(min(max(seconds / 60, 0.2), 10))
            if time.monotonic() > told + SAY_SECONDS:
                told += SAY_SECONDS
                say(end - told, figures, killed, held)
        ending.set()
        guarded(lambda: join_all(threads, 5 * SECONDS))()  # figures of an hour are not lost for who does not end
        after, restarted = Figures(), list[int]()
        guarded(lambda: honest(url, seed, lambda count: count < 25, after, whole))()
        guarded(lambda: restarted.append(restarts(url)))()
        guarded(lambda: look(process.pid, held))()
        process_alive = process.poll() is None
        said = (Path(folder) / "log").read_text()
    unwelcome = {status: n for status, n in statuses.items() if status != "lost" and status not in FINE}
    return {
        "seconds": round(seconds),
        "honest": {
            "answered": len(figures.waits),
            "sent again": dict(figures.again),
            "lost": figures.lost + after.lost,
            f"answered after more than {SECONDS:g} s, since processes were missing": figures.late + after.late,
            "foreign text": figures.foreign + after.foreign,
            "other than 200": dict(figures.failed + after.failed),
            "p50, p99 s": [round(quantile(figures.waits, share), 3) for share in (0.5, 0.99)],
            "p50, p99 s alone before": [round(quantile(quiet.waits, share), 3) for share in (0.5, 0.99)],
            "p50, p99 s alone after": [round(quantile(after.waits, share), 3) for share in (0.5, 0.99)],
        },
        "hostile answers": {str(status): n for status, n in sorted(statuses.items(), key=str)},
        "hostile connections": connections["made"],
        "5xx but 503 and 504": unwelcome,
        "killed": dict(killed),
        "seconds until killed ones were there again": [round(seconds, 1) for seconds in whole.away],
        "started again, though not killed": max(0, sum(restarted) - killed["engine"] - killed["front"]),
        "server lives": process_alive,
        "defects in its log": defects(said),
        "engine driver": {
            "whole": sum(one.whole for one in driven),
            "dropped": sum(one.dropped for one in driven),
            "wrong": sum(one.wrong for one in driven),
        },
        "checkpoints": {
            "tried": sum(done + len(bad) for done, bad in spoilt),
            "failures": [line for _, bad in spoilt for line in bad],
        },
        "held": {
            kind: {
                "MiB": one.mebibytes[:: max(1, len(one.mebibytes) // 10)],
                "MiB first, last, peak": [one.mebibytes[0], one.mebibytes[-1], max(one.mebibytes)],
                "each process: looks, MiB first, middle, last, peak": {
                    str(pid): [len(m), m[0], m[len(m) // 2], m[-1], max(m)] for pid, m in one.by_process.items()
                },
                "descriptors first, last, peak": [one.descriptors[0], one.descriptors[-1], max(one.descriptors)],
                "threads first, last, peak": [one.threads[0], one.threads[-1], max(one.threads)],
            }
            for kind, one in held.items()
        },
        "errors of the campaign": [repr(error) for error in errors],
    }


def say(left: float, figures: Figures, killed: Counter[str], held: dict[str, Held]) -> None:
    """A line of what was counted so far, for whoever does not see the end."""
    seen = {"answered": len(figures.waits), "lost": figures.lost, "foreign": figures.foreign, "killed": dict(killed)}
    memory = {kind: one.mebibytes[-1] for kind, one in held.items()}
    print(json.dumps({"seconds left": round(left), **seen, "MiB": memory}), file=sys.stderr, flush=True)


@contextlib.contextmanager
def noted(errors: list[BaseException], which: Callable[[BaseException], bool]) -> Iterator[None]:
    """What fails inside, if it is one of these, is noted, and not raised."""
    try:
        yield
    except BaseException as error:
        if not which(error):
            raise
        errors.append(error)


def restarts(url: str) -> int:
    """How often a front or the engine was started again, as the server's metrics have it. Asks again where nobody
    answers, for as long as a client has patience; raises httpx.TransportError then.
    """
    end = time.monotonic() + SECONDS
    while True:
        try:
            lines = httpx.get(f"{url}/metrics", timeout=SECONDS).text.splitlines()
            break
        except httpx.TransportError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)
    return sum(
        int(float(line.split()[-1])) for line in lines if re.match(r"cellar:(engine|front)_restarts_total", line)
    )


def defects(log: str) -> dict[str, int]:
    """What the server itself calls a defect, each with the last line of its traceback."""
    found = Counter[str]()
    for part in log.split("by a defect")[1:]:
        lines = [line for line in part.splitlines()[1:] if line[:1] not in ("", " ")]
        places = [line.strip() for line in part.splitlines() if line.lstrip().startswith("File ")]
        ends = [k for k, line in enumerate(lines) if re.match(r"[\w.]+(Error|Exception|Group)\b", line)]
        found[f"{lines[ends[0]] if ends else lines[:2]} ({places[-1] if places else 'nowhere'})"[:400]] += 1
    found.update({"IntegrityError": log.count("IntegrityError")} if "IntegrityError" in log else {})
    return dict(found)


def is_clean(report: dict[str, Any]) -> bool:
    """True if nothing crashed, was lost, was wrong or failed by a defect."""
    honest_clients = report["honest"]
    return (
        report["server lives"]
        and not report["started again, though not killed"]
        and not (honest_clients["lost"] or honest_clients["foreign text"] or honest_clients["other than 200"])
        and not (report["5xx but 503 and 504"] or report["defects in its log"] or report["engine driver"]["wrong"])
        and not (report["checkpoints"]["failures"] or report["errors of the campaign"])
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kill-every", type=float, default=20.0, help="seconds, about; 0 for never")
    parser.add_argument("--rest", type=float, default=0.0, help="seconds that an attacker rests between two attacks")
    options = parser.parse_args()
    report = run(60 * options.minutes, options.seed, options.kill_every or None, rest=options.rest)
    print(json.dumps(report, indent=1))
    sys.exit(not is_clean(report))


if __name__ == "__main__":
    main()
