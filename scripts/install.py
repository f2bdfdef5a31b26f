"""`pip install`, with one line that says what it is doing: a bar on a terminal, a line per step elsewhere.

    .venv/bin/python scripts/install.py -e .[server]

The arguments are pip's. What pip printed is shown if it fails.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

WIDTH = 24
LARGE_MB = 20.0
UNITS = {"bytes": 1e-6, "kB": 1e-3, "MB": 1.0, "GB": 1e3}


class Progress:
    """What pip has told so far. `installed` is how many of the packages that it installs are there."""

    def __init__(self) -> None:
        self.collected = 0
        self.megabytes = 0.0
        self.current = ""
        self.installing: list[str] = []
        self.lines: list[str] = []

    def feed(self, line: str) -> str | None:
        """One line of pip's; -> what to say of it where there is no bar."""
        self.lines.append(line)
        words = line.split()
        if line.startswith("Collecting "):
            self.collected += 1
            self.current = re.split(r"[<>=!~\[ ;(]", words[1])[0]
        elif match := re.match(r"\s*(Downloading|Using cached) (\S+?)(?:\.metadata)? \((\S+) (bytes|kB|MB|GB)\)", line):
            size = float(match[3].replace(",", "")) * UNITS[match[4]]
            self.megabytes += size
            self.current = f"{match[2].rsplit('/', 1)[-1].split('-')[0]} ({size:.0f} MB)"
            if size >= LARGE_MB:
                return f"{match[1].lower()} {self.current}"
        elif line.startswith("Installing collected packages: "):
            self.installing = [name.strip() for name in line.partition(": ")[2].split(",")]
            return f"installing {len(self.installing)} packages"
        elif words[:3] == ["Preparing", "editable", "metadata"]:
            self.current = "Cellar itself"
        return None

    def installed(self, site: Path) -> int:
        """How many of the packages to install have their record in `site`."""
        there = {folder.name.split("-")[0].lower().replace("_", "-") for folder in site.glob("*.dist-info")}
        return sum(name.lower().replace("_", "-") in there for name in self.installing)

    def line(self, seconds: float, site: Path, columns: int) -> str:
        """The line of a terminal: a bar that fills while packages are installed, and that runs before."""
        if self.installing:
            count, whole = self.installed(site), len(self.installing)
            full = WIDTH * count // whole
            bar = "#" * full + "-" * (WIDTH - full)
            text = f"installing {count} of {whole} packages"
        else:
            at = int(seconds * 4) % (2 * (WIDTH - 4))
            at = min(at, 2 * (WIDTH - 4) - at)
            bar = "-" * at + "####" + "-" * (WIDTH - 4 - at)
            text = f"fetching {self.collected} packages, {self.megabytes:.0f} MB: {self.current}"
        return f"[{bar}] {seconds:3.0f} s  {text}"[: columns - 1]


def run(command: Sequence[str], out: TextIO, terminal: bool, site: Path) -> int:
    """Run pip and tell of it; -> its exit status."""
    started, progress = time.monotonic(), Progress()
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment
    )
    ended = threading.Event()

    def draw() -> None:
        while not ended.wait(0.2):
            line = progress.line(time.monotonic() - started, site, shutil.get_terminal_size().columns)
            out.write(f"\r\x1b[K{line}")
            out.flush()

    drawing = threading.Thread(target=draw, daemon=True)
    if terminal:
        drawing.start()
    assert process.stdout is not None
    for line in process.stdout:
        said = progress.feed(line.rstrip("\n"))
        if said is not None and not terminal:
            out.write(f"  {time.monotonic() - started:3.0f} s  {said}\n")
            out.flush()
    status = process.wait()
    ended.set()
    if terminal:
        drawing.join()
        out.write("\r\x1b[K")
    if status != 0:
        out.write("\n".join(progress.lines) + "\n")
    else:
        out.write(f"  {time.monotonic() - started:3.0f} s  done\n")
    out.flush()
    return status


def main() -> int:
    """From the command line."""
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]
    site = Path(sysconfig.get_path("purelib"))
    return run([*pip, *sys.argv[1:]], sys.stdout, sys.stdout.isatty(), site)


if __name__ == "__main__":
    sys.exit(main())
