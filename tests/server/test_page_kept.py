"""Conversations that the server keeps, on the page: resumed elsewhere, renamed, searched, exported, deleted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page, Route, expect

from tests.limits import SECONDS, until
from tests.server.browser import chromium, forget_all, ready, store, watched
from tests.server.served import Served, serve
from tests.server.spoken import HYBRID, says

pytestmark = pytest.mark.long

STORED_ITEMS = """async (id) => {
    const { Store } = await import("/page/store.js");
    const store = new Store();
    await store.open();
    return (await store.one(id)).items?.length;
}"""
FOX = "The fox went far away, and came back in the evening with nothing but a good story. " * 3


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    kept = {"data_dir": str(tmp_path_factory.mktemp("data"))}
    with serve(kept, template=HYBRID, max_model_len=8192, num_slots=2048) as served:
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, served: Served) -> Iterator[Page]:
    with watched(browser, f"{served.url}/", accept_downloads=True) as page:
        yield page


def ask(page: Page, text: str) -> None:
    answers = page.get_by_role("button", name="Copy")
    before = answers.count()
    page.get_by_role("textbox", name="Message").fill(text)
    page.get_by_role("textbox", name="Message").press("Enter")
    expect(answers).to_have_count(before + 1)


def entry(page: Page, name: str) -> Locator:
    return page.get_by_role("navigation").get_by_role("button", name=name, exact=True)


def listed(served: Served) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{served.url}/v1/conversations", timeout=SECONDS).json()["data"]
    return found


def texts(served: Served, id: str) -> list[str]:
    answer = httpx.get(f"{served.url}/v1/conversations/{id}/items?order=asc&limit=100", timeout=SECONDS)
    return [item["content"][0]["text"] for item in answer.json()["data"]]


def accessible(page: Page) -> None:
    # What moves is between two colours; at rest the contrast counts.
    page.evaluate(
        "() => Promise.all(document.getAnimations().filter(one => one instanceof CSSTransition)"
        ".map(one => one.finished.catch(() => null)))"
    )
    found = Axe().run(page).response["violations"]
    assert not found, [(rule["id"], [node["html"] for node in rule["nodes"]]) for rule in found]


def test_a_conversation_is_resumed_in_another_browser(page: Page, browser: Browser, served: Served) -> None:
    with says(served, "<think>Hm, a fox.</think>It went far away."):
        ask(page, "Tell me of a fox")
    with says(served, "It came back."):
        ask(page, "And then?")
    until(lambda: [len(texts(served, one["id"])) for one in listed(served)] == [4])
    (kept,) = listed(served)
    assert texts(served, kept["id"]) == ["Tell me of a fox", "It went far away.", "And then?", "It came back."]
    page.reload()
    ready(page)
    expect(page.locator(".prose").last).to_have_text("It came back.")
    context = browser.new_context()
    other = context.new_page()
    other.goto(f"{served.url}/")
    ready(other)
    entry(other, "Tell me of a fox").click()
    expect(other.locator(".prose")).to_have_text(["It went far away.", "It came back."])
    with says(served, "It slept."):
        ask(other, "And at night?")
    until(lambda: len(texts(served, kept["id"])) == 6)
    other.get_by_role("button", name="Retry").last.click()
    expect(other.get_by_role("button", name="Copy").last).to_be_visible()
    until(lambda: len(texts(served, kept["id"])) == 6)
    context.close()


def test_thoughts_are_folded(page: Page, served: Served) -> None:
    with says(served, "<think>\nHm, <b>a fox</b>.\n</think>\n\nIt *went*."):
        ask(page, "Tell me")
    expect(page.locator(".prose").last).to_have_text("It went.")
    fold = page.locator("details.thought")
    expect(fold.get_by_text("Thought")).to_be_visible()
    expect(fold.get_by_text("Hm, <b>a fox</b>.")).to_be_hidden()
    fold.get_by_text("Thought").click()
    expect(fold.get_by_text("Hm, <b>a fox</b>.")).to_be_visible()
    accessible(page)
    with says(served, "Plain."):
        ask(page, "Again")
    expect(page.locator("details.thought").last).to_be_hidden()


def test_rename_search_export(page: Page, served: Served, tmp_path: Path) -> None:
    for question, answer in (("Tell me of a fox", "It went far away."), ("Count to two", "One, two.")):
        with says(served, answer):
            ask(page, question)
        page.get_by_role("button", name="New conversation").first.click()
    entry(page, "Count to two").hover()
    page.get_by_role("button", name="Rename: Count to two").click()
    page.get_by_role("textbox", name="Name").fill("Numbers")
    accessible(page)
    page.get_by_role("button", name="Rename", exact=True).click()
    expect(entry(page, "Numbers")).to_be_visible()
    until(lambda: "Numbers" in [one["metadata"]["title"] for one in listed(served)])
    search = page.get_by_label("Search conversations")
    search.fill("far AWAY")
    expect(entry(page, "Numbers")).to_be_hidden()
    expect(entry(page, "Tell me of a fox")).to_be_visible()
    search.fill("")
    entry(page, "Numbers").hover()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export: Numbers").click()
    assert download.value.suggested_filename == "Numbers.json"
    download.value.save_as(tmp_path / "it.json")
    exported = json.loads((tmp_path / "it.json").read_text(encoding="utf-8"))
    assert exported["title"] == "Numbers"
    assert [(m["role"], m["content"]) for m in exported["messages"]] == [
        ("user", "Count to two"),
        ("assistant", "One, two."),
    ]


def test_where_it_lies_and_that_it_is_deleted(page: Page, served: Served) -> None:
    with says(served, FOX):
        ask(page, FOX)
    (kept,) = listed(served)
    expect(page.locator(".entry-memory").first).to_contain_text("on device")

    def held() -> int:
        answer = httpx.get(f"{served.url}/engine/memory?conversation={kept['id']}", timeout=SECONDS)
        return int(answer.json()["data"][0]["tokens"]["device"])

    assert held() > 32
    accessible(page)
    page.get_by_role("button", name="Delete: The fox").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.locator(".entry")).to_have_count(0)
    assert listed(served) == []
    assert held() == 0
    page.reload()
    ready(page)
    expect(page.locator(".entry")).to_have_count(0)


def test_what_the_server_loses_is_kept_again_with_the_next_turn(browser: Browser, served: Served) -> None:
    with watched(browser, f"{served.url}/", expected=("404",)) as page:
        lose_and_go_on(page, served)


def lose_and_go_on(page: Page, served: Served) -> None:
    with says(served, "One."):
        ask(page, "Count")
    until(lambda: [texts(served, one["id"]) for one in listed(served)] == [["Count", "One."]])
    forget_all(f"{served.url}/")
    page.reload()
    ready(page)
    with says(served, "Two."):
        ask(page, "Go on")
    until(lambda: [texts(served, one["id"]) for one in listed(served)] == [["Count", "One.", "Go on", "Two."]])


def test_an_answer_that_never_came_makes_no_second_copy(browser: Browser, served: Served) -> None:
    with watched(browser, f"{served.url}/", expected=("ERR_FAILED",)) as page:
        lose_answers(page, served)


def lose_answers(page: Page, served: Served) -> None:
    listed_by_page = page.get_by_text("are kept by this server")
    expect(listed_by_page).to_be_visible()
    store(page, "once", "Deer.")  # the next page sends it

    def carried_out(route: Route) -> None:
        if route.request.method == "POST":
            route.fetch()
            route.abort()
        else:
            route.continue_()

    turns = ["What is here?", "Deer.", "And here?"]
    for path, held in (("v1/conversations", []), ("v1/conversations/*/items", turns)):
        page.route(f"**/{path}", carried_out)
        with page.expect_event("requestfailed"):
            page.reload()
        page.unroute(f"**/{path}")
        assert [texts(served, one["id"]) for one in listed(served)] == [held]
    page.reload()
    ready(page)
    expect(listed_by_page).to_be_visible()
    until(lambda: page.evaluate(STORED_ITEMS, "once") == len(turns))
    expect(page.locator(".entry")).to_have_count(1)
    (kept,) = listed(served)
    assert texts(served, kept["id"]) == turns


def test_what_was_never_opened_is_found_by_the_server(page: Page, served: Served) -> None:
    client = served.client()
    for title, text in (("Travels", "The badger went to the seaside."), ("Cooking", "Leek soup.")):
        client.conversations.create(metadata={"title": title}, items=[{"role": "user", "content": text}])
    page.reload()
    expect(entry(page, "Travels")).to_be_visible()
    search = page.get_by_label("Search conversations")
    search.fill("SEASIDE badger")
    expect(entry(page, "Travels")).to_be_visible()
    expect(entry(page, "Cooking")).to_be_hidden()
    search.fill("soup seaside")
    expect(entry(page, "Travels")).to_be_hidden()
    search.fill("cook")
    expect(entry(page, "Cooking")).to_be_visible()
    search.fill("")
    expect(entry(page, "Travels")).to_be_visible()
