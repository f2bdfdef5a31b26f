"""Hosts of one machine: network namespaces, each with a cable to a switch that may be pulled or made narrow.

Nothing of it has a name or outlives its maker: a namespace lives as long as a process that sleeps in it.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_NEW_NET = 0x40000000


def run(*command: str) -> None:
    """Run a program to its end. Raises CalledProcessError."""
    subprocess.run(command, check=True, capture_output=True, text=True)


def in_a_network_of_its_own(module: str, arguments: Sequence[str]) -> None:
    """Become the same program behind `unshare --net`, once; what it makes is nobody else's."""
    if os.environ.get("CELLAR_OWN_NETWORK") != "1":
        os.environ["CELLAR_OWN_NETWORK"] = "1"
        os.execvp("unshare", ["unshare", "--net", sys.executable, "-m", module, *arguments])
    run("ip", "link", "set", "lo", "up")


class Switch:
    """A bridge at 10.77.0.254, and the hosts behind it."""

    def __init__(self) -> None:
        run("ip", "link", "add", "switch", "type", "bridge")
        run("ip", "address", "add", "10.77.0.254/24", "dev", "switch")
        run("ip", "link", "set", "switch", "up")
        self._hosts: list[Host] = []

    def host(self) -> Host:
        """One more."""
        self._hosts.append(Host(len(self._hosts) + 1))
        return self._hosts[-1]

    def close(self) -> None:
        """Everything that runs there ends."""
        for host in self._hosts:
            host.close()


class Host:
    """Number k has the address 10.77.0.k."""

    def __init__(self, number: int) -> None:
        self.address = f"10.77.0.{number}"
        self._cable = f"cable{number}"
        self._keeper = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        self._file = Path(f"/proc/{self._keeper.pid}/ns/net")
        ours = os.readlink("/proc/self/ns/net")
        while os.readlink(self._file) == ours:
            pass
        run("ip", "link", "add", self._cable, "type", "veth", "peer", "name", "uplink", "netns", str(self._keeper.pid))
        run("ip", "link", "set", self._cable, "master", "switch", "up")
        for command in (
            ("link", "set", "lo", "up"),
            ("address", "add", f"{self.address}/24", "dev", "uplink"),
            ("link", "set", "uplink", "up"),
        ):
            run(*self.within, "ip", *command)

    def processes(self, title: str = "") -> list[int]:
        """Those that run there and whose titles begin so."""
        found, here = [], os.readlink(self._file)
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.readlink(path / "ns" / "net") == here and (path / "cmdline").read_text().startswith(title):
                    found.append(int(path.name))
        return sorted(found)

    @property
    def within(self) -> tuple[str, ...]:
        """A command that begins another one there."""
        return ("nsenter", "--target", str(self._keeper.pid), "--net")

    def pull(self) -> None:
        """Cut the host off: the cable keeps its light, and nothing passes."""
        run("ip", "link", "set", self._cable, "nomaster")

    def plug(self) -> None:
        """Connect it again."""
        run("ip", "link", "set", self._cable, "master", "switch")

    def narrow(self, rate: str | None) -> None:
        """So many bits pass in a second, `tc` says in which words, in each direction; None: as many as may be."""
        for within, device in (((), self._cable), (self.within, "uplink")):
            with suppress(subprocess.CalledProcessError):
                run(*within, "tc", "qdisc", "del", "dev", device, "root")
            if rate is not None:
                run(
                    *within,
                    "tc",
                    "qdisc",
                    "add",
                    "dev",
                    device,
                    "root",
                    "tbf",
                    "rate",
                    rate,
                    "burst",
                    "16kb",
                    "limit",
                    "256kb",
                )

    def listener(self, port: int) -> socket.socket:
        """A socket that listens there: what a thread opens in a namespace stays in it."""
        libc = ctypes.CDLL(None, use_errno=True)
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        there = os.open(self._file, os.O_RDONLY)
        try:
            assert libc.setns(there, _NEW_NET) == 0, os.strerror(ctypes.get_errno())
            return socket.create_server((self.address, port), backlog=64)
        finally:
            assert libc.setns(before, _NEW_NET) == 0
            os.close(before)
            os.close(there)

    def close(self) -> None:
        """It is gone."""
        self._keeper.kill()
        self._keeper.wait()
