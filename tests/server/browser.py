"""Chromium for tests: a page that says what went wrong in it, and `cellar serve` with the demo model."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from playwright.sync_api import Browser, Page, expect, sync_playwright

ROOT = Path(__file__).parents[2]
NAMES = ("chromium", "chromium-browser", "google-chrome")
SLOW = 60_000
"""Milliseconds after which what is expected of a page will not come any more, however busy the machine."""


STORED = """async ([id, text]) => {
    const { Store } = await import("/page/store.js");
    const store = new Store();
    await store.open();
    const usage = { prompt_tokens: 9, completion_tokens: 90, total_tokens: 99 };
    await store.save({ id, created: 0, updated: Date.now(), title: "Kept", turns: [
        { role: "user", text: "What is here?" },
        { role: "assistant", text, finish: "stop", usage, seconds: 2, first: 0.1, seed: 1 },
        { role: "user", text: "And here?" },
        { role: "assistant", text: "", finish: "error", error: "The server cannot be reached." },
    ] });
}"""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's browser; scripts/setup-system installs it."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    assert found is not None, "there is no chromium; run scripts/setup-system."
    flags = ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    expect.set_options(timeout=SLOW)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=flags)
        yield browser
        browser.close()


@contextmanager
def watched(browser: Browser, url: str, expected: tuple[str, ...] = (), **options: Any) -> Iterator[Page]:
    """A page in a context of its own. In the end it must have asked no other host, and reported no error.

    `expected` are parts of error messages that may come.
    """
    forget_all(url)
    context = browser.new_context(**options)
    context.set_default_timeout(SLOW)
    page = context.new_page()
    errors: list[str] = []
    hosts: set[str] = set()
    page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda said: errors.append(said.text) if said.type in ("error", "warning") else None)
    page.goto(url)
    ready(page)
    yield page
    page.unroute_all(behavior="ignoreErrors")  # a handler that still waits for its answer must not fail the next test
    context.close()
    assert hosts == {urlsplit(url).netloc}
    unexpected = [error for error in errors if not any(part in error for part in expected)]
    assert not unexpected, unexpected


def forget_all(url: str) -> None:
    """The server keeps conversations of no test before, as far as it lets them be deleted without a key."""
    with httpx.Client(base_url=url, timeout=SLOW / 1000) as http:
        listed = http.get("v1/conversations?limit=100")
        for conversation in listed.json()["data"] if listed.status_code == 200 else ():
            http.delete(f"v1/conversations/{conversation['id']}")


def store(page: Page, id: str, text: str) -> None:
    """Put a conversation into the browser's storage, as if it had been led without the server's knowledge."""
    page.evaluate(STORED, [id, text])


def ready(page: Page) -> None:
    """Wait until the page can be used, and knows the model."""
    page.wait_for_selector("html[data-ready]")
    page.wait_for_selector(".lamp.up, .lamp.busy, .lamp.down", state="attached")


@contextmanager
def demo_server(*options: str) -> Iterator[str]:
    """`cellar serve` with the demo model; gives its address."""
    kept = [] if "--data-dir" in options else ["--data-dir", tempfile.mkdtemp(prefix="cellar-test-")]
    command = [sys.executable, "-m", "cellar", "serve", "--port", "0", "--log-level", "warning", *kept, *options]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert " at http://" in line
        yield line.split(" at ")[1].strip().removesuffix("/v1") + "/"
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
