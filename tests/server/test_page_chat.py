"""The page over `cellar serve` with the demo model, in Chromium: stories are told, stopped, kept."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.limits import SECONDS, until
from tests.server.browser import chromium, demo_server, ready, watched

pytestmark = pytest.mark.long

SLOW = 120_000  # ms; an answer on a busy machine


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with demo_server("--num-threads", "1") as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    with watched(browser, url) as page:
        yield page


def field(page: Page) -> Locator:
    return page.get_by_role("textbox", name="Message")


def send(page: Page, text: str) -> None:
    field(page).fill(text)
    field(page).press("Enter")
    expect(field(page)).to_have_value("")


def ended(page: Page) -> None:
    expect(page.get_by_role("button", name="Send")).to_be_visible(timeout=SLOW)


def longest(page: Page, tokens: int, seed: str = "7") -> None:
    """How long answers may be; with a seed they are the same in every run."""
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Longest answer, tokens").fill(str(tokens))
    page.get_by_label("Seed").fill(seed)
    page.keyboard.press("Escape")


def answers(page: Page) -> Locator:
    return page.get_by_role("group", name="Answer", exact=True)


def words(page: Page) -> str:
    return page.locator(".prose").last.inner_text()


def test_two_turns_one_stopped_and_all_found_again(page: Page, url: str) -> None:
    expect(page.get_by_role("heading", name="Begin a story")).to_be_visible()
    longest(page, 40)
    send(page, "Once upon a time")
    ended(page)
    first = words(page)
    assert len(first.split()) > 15
    expect(answers(page).last).to_contain_text("cut at 40 tokens")

    send(page, "The next day the old man")
    ended(page)
    second = words(page)
    assert len(answers(page).all()) == 2
    assert second != first
    expect(answers(page).last).to_contain_text("from cache")

    def engine() -> dict[str, int]:
        found: dict[str, int] = httpx.get(f"{url}engine/status", timeout=SECONDS).json()["engine"]
        return found

    longest(page, 1900)
    before = engine()["generation_tokens"]
    send(page, "And then the fox")
    expect(page.get_by_role("button", name="Stop the answer")).to_be_visible()
    page.wait_for_function("() => document.querySelector('.exchange:last-child .prose').textContent.length > 20")
    grown = len(words(page))
    page.wait_for_function(
        f"() => document.querySelector('.exchange:last-child .prose').textContent.length > {grown + 20}"
    )
    page.keyboard.press("Escape")
    ended(page)
    expect(answers(page).last).to_contain_text("stopped")
    expect(page.locator("#status")).to_have_text("Stopped")
    third = words(page)
    page.wait_for_timeout(500)
    assert words(page) == third
    until(lambda: engine()["running"] == 0)
    assert engine()["generation_tokens"] < before + 1500

    title = page.get_by_role("heading", level=1)
    expect(title).to_have_text("Once upon a time")
    page.reload()
    ready(page)
    expect(title).to_have_text("Once upon a time")
    assert [one.inner_text() for one in page.locator(".prose").all()] == [first, second, third]
    expect(page.get_by_role("group", name="You").nth(1)).to_have_text("The next day the old man")

    # Without its address, too, it is on the shelf.
    page.goto(url)
    ready(page)
    expect(page.get_by_role("heading", name="Begin a story")).to_be_visible()
    page.get_by_role("navigation").get_by_role("button", name="Once upon a time", exact=True).click()
    assert words(page) == third


def test_stop_button_retry_go_on_and_edit(page: Page) -> None:
    longest(page, 1900)
    page.get_by_role("button", name="The old fox").click()
    page.wait_for_function("() => document.querySelector('.prose')?.textContent.length > 20")
    page.get_by_role("button", name="Stop the answer").click()
    ended(page)
    expect(field(page)).to_be_focused()
    stopped = words(page)

    longest(page, 20, seed="")
    page.get_by_role("button", name="Go on").click()
    ended(page)
    assert words(page).startswith(stopped)
    assert len(words(page)) > len(stopped)

    page.get_by_role("button", name="Another").click()
    ended(page)
    assert not words(page).startswith(stopped)

    another = words(page)
    page.get_by_role("button", name="Edit").click()
    opening = page.get_by_role("textbox", name="Edit your message")
    expect(opening).to_have_value("The old fox looked at the moon and")
    opening.fill("The young fox looked at the moon and")
    opening.press("Enter")
    expect(page.get_by_role("group", name="Versions of this line")).to_contain_text("2 / 2")
    ended(page)
    page.get_by_role("group", name="Versions of this line").get_by_role("button", name="Older version").click()
    assert words(page) == another
    page.get_by_role("group", name="Versions of this answer").get_by_role("button", name="Older version").click()
    assert words(page).startswith(stopped)


def test_a_seed_repeats_an_answer(page: Page) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("1.2")
    page.keyboard.press("Escape")
    longest(page, 30)
    send(page, "A king had")
    ended(page)
    once = words(page)
    page.get_by_role("button", name="Another").click()
    ended(page)
    assert words(page) == once
    expect(answers(page).last).to_contain_text("seed 7")


def test_conversations_run_beside_each_other_and_are_deleted(page: Page) -> None:
    longest(page, 150)
    send(page, "The first of them")
    page.get_by_role("button", name="New conversation").click()
    send(page, "The second of them")
    ended(page)
    shelf = page.get_by_role("navigation")
    shelf.get_by_role("button", name=re.compile("^The first of them")).click()
    ended(page)
    expect(answers(page).last).to_contain_text("tokens")
    expect(page.get_by_role("group", name="You")).to_have_text("The first of them")

    shelf.get_by_role("button", name="Delete: The first of them").click()
    page.get_by_role("alertdialog").get_by_role("button", name="Keep").click()
    expect(shelf.get_by_role("listitem")).to_have_count(2)
    shelf.get_by_role("button", name="Delete: The first of them").click()
    page.get_by_role("alertdialog").get_by_role("button", name="Delete").click()
    expect(shelf.get_by_role("listitem")).to_have_count(1)
    page.reload()
    ready(page)
    expect(shelf.get_by_role("listitem")).to_have_count(1)

    # One that still runs is stopped, and does not come back.
    longest(page, 1900)
    send(page, "And on it goes")
    page.wait_for_function("() => document.querySelector('.exchange:last-child .prose')?.textContent.length > 20")
    shelf.get_by_role("button", name="Delete: And on it goes").click()
    page.get_by_role("alertdialog").get_by_role("button", name="Delete").click()
    expect(shelf.get_by_role("listitem")).to_have_count(1)
    page.wait_for_timeout(300)
    page.reload()
    ready(page)
    expect(shelf.get_by_role("listitem")).to_have_count(1)


def test_another_tab_sees_the_same(page: Page, url: str) -> None:
    other = page.context.new_page()
    other.goto(url)
    ready(other)
    longest(page, 10)
    send(page, "In both tabs")
    ended(page)
    entry = other.get_by_role("navigation").get_by_role("button", name="In both tabs", exact=True)
    entry.click()
    expect(other.locator(".prose")).not_to_be_empty()
    assert words(other) == words(page)


def test_the_engine_is_seen_at_work(page: Page, url: str) -> None:
    longest(page, 1900)
    send(page, "It was a dark")
    engine = page.get_by_role("complementary", name="Engine")
    expect(engine.locator("#running")).to_have_text("1")
    expect(engine.locator(".dots.running i")).to_have_count(1)
    page.wait_for_function("() => Number(document.getElementById('speed').textContent) > 0")
    assert page.locator(".rack .used").count() > 0
    ended(page)
    expect(engine.locator("#running")).to_have_text("0")
    expect(engine.locator(".rack .used")).to_have_count(0)
    assert page.locator(".rack .kept").count() > 0


def test_a_page_left_open_does_not_keep_the_server(browser: Browser) -> None:
    with demo_server("--num-threads", "1") as url:
        page = browser.new_page()
        page.goto(url)
        ready(page)
        # leaving the block sends SIGTERM; were the page's looks a stream, the server would wait for it
    expect(page.locator("#model")).to_have_text("The server does not answer")
    page.close()
