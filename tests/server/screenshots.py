"""Pictures of the page for docs/images: a story of the demo model, told while others use the engine too.

scripts/screenshots
"""

from __future__ import annotations

import io
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from PIL import Image
from playwright.sync_api import Page

from tests.limits import join_all
from tests.server.browser import ROOT, chromium, demo_server, watched

IMAGES = ROOT / "docs" / "images"
MOST_BYTES = 200_000
SHELF = (
    "The king had three daughters",
    "A poor fisherman had three sons",
    "When the moon rose, the toys began to talk.",
)
STORY = ("Once upon a time there was a little tailor who", "One day the king's messenger came and")
SEED = "23"
FIRST = "60"  # tokens, after which the first answer ends a sentence


@contextmanager
def company(url: str, clients: int) -> Iterator[None]:
    """Others who use the engine: conversations that come and go, and share their beginnings."""
    over = threading.Event()

    def one(number: int) -> None:
        rng = random.Random(number)
        with httpx.Client(timeout=None) as http:
            while not over.wait(rng.uniform(0, 6)):
                text = rng.choice(SHELF)
                for _ in range(rng.randint(1, 3)):
                    if over.is_set():
                        return
                    body = {"prompt": text, "max_tokens": rng.randint(20, 120), "seed": rng.randint(0, 99)}
                    text += http.post(f"{url}v1/completions", json=body).json()["choices"][0]["text"]

    threads = [threading.Thread(target=one, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        join_all(threads)


def settings(page: Page, **fields: str) -> None:
    """Set fields of the settings by their names."""
    page.get_by_role("button", name="Settings").click()
    for name, value in fields.items():
        page.locator(f"#{name}").fill(value)
    page.keyboard.press("Escape")


def say(page: Page, text: str, whole: bool = True) -> None:
    """Send a message, and wait for its answer."""
    page.locator("#ask").fill(text)
    page.locator("#send").click()
    if whole:
        page.locator("#stop").wait_for(state="visible")
        page.locator("#send").wait_for(state="visible", timeout=300_000)


def tell(page: Page) -> None:
    """Tell the story; its second part is still on its way in the end."""
    settings(page, max_tokens=FIRST, seed=SEED)
    say(page, STORY[0])
    settings(page, max_tokens="600")
    say(page, STORY[1], whole=False)
    page.wait_for_function("() => document.querySelector('.exchange:last-child .prose')?.textContent.length > 420")


def picture(page: Page, name: str, scheme: str) -> None:
    """Take one picture, in 256 colours, which are all that the page has."""
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    page.mouse.move(200, 600)
    page.wait_for_timeout(1200)
    path = IMAGES / f"page-{name}.png"
    shot = Image.open(io.BytesIO(page.screenshot()))
    shot.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    size = path.stat().st_size
    print(f"{path.relative_to(ROOT)}: {size / 1000:.0f} kB")
    if size >= MOST_BYTES:
        sys.exit(f"{path} is larger than {MOST_BYTES} bytes.")


def main() -> None:
    """Take all pictures."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    phone = {"viewport": {"width": 390, "height": 780}, "device_scale_factor": 2, "is_mobile": True, "has_touch": True}
    with demo_server("--max-num-seqs", "8", "--num-threads", "1") as url, chromium() as browser:
        with watched(browser, url, viewport={"width": 1360, "height": 860}) as page:
            picture(page, "welcome", "light")
            settings(page, max_tokens="40", seed=SEED)
            for text in SHELF:
                say(page, text)
                page.get_by_role("button", name="New conversation").click()
            with company(url, 14):
                time.sleep(60)
                tell(page)
                picture(page, "light", "light")
                picture(page, "dark", "dark")
        with watched(browser, url, **phone) as page, company(url, 14):
            time.sleep(60)
            tell(page)
            picture(page, "phone", "light")
            page.locator("#gauges-toggle").click()
            picture(page, "phone-engine", "dark")


if __name__ == "__main__":
    main()
