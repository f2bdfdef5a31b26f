"""Versions on the page: a question edited anywhere, an answer made anew; what was there can be leafed back to."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page, expect

from tests.limits import SECONDS, until
from tests.server.browser import chromium, ready, watched
from tests.server.served import Served, serve
from tests.server.spoken import HYBRID, says

pytestmark = pytest.mark.long


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
    # Who reloads before the page knows the ids of what it has stored has it ask for ids that are gone.
    with watched(browser, f"{served.url}/", expected=("404",)) as page:
        yield page


def ended(page: Page) -> None:
    """No answer is under way."""
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def ask(page: Page, text: str) -> None:
    answers = page.get_by_role("button", name="Copy")
    before = answers.count()
    page.get_by_role("textbox", name="Message", exact=True).fill(text)
    page.get_by_role("textbox", name="Message", exact=True).press("Enter")
    expect(answers).to_have_count(before + 1)


def shown(page: Page) -> list[str]:
    """Questions and answers, in turn."""
    return [one.inner_text().strip() for one in page.locator(".question p, .prose").all()]


def question(page: Page, number: int) -> Locator:
    return page.get_by_role("group", name="You").nth(number)


def edit(page: Page, number: int) -> Locator:
    """Begin to edit a question; gives its field."""
    question(page, number).hover()
    question(page, number).get_by_role("button", name="Edit").click()
    return page.get_by_role("textbox", name="Edit your message")


def kept_texts(served: Served) -> list[str]:
    """What the server keeps of its only conversation."""
    (conversation,) = httpx.get(f"{served.url}/v1/conversations", timeout=SECONDS).json()["data"]
    path = f"{served.url}/v1/conversations/{conversation['id']}/items?order=asc&limit=100"
    return [item["content"][0]["text"] for item in httpx.get(path, timeout=SECONDS).json()["data"]]


def three(page: Page, served: Served) -> list[str]:
    """A conversation of three questions."""
    for number in ("one", "two", "three"):
        with says(served, f"Answer {number}."):
            ask(page, f"Question {number}")
    return [f"{what} {number}" for number in ("one", "two", "three") for what in ("Question", "Answer")]


def test_escape_restores_a_question(page: Page, served: Served) -> None:
    three(page, served)
    before = shown(page)
    field = edit(page, 1)
    expect(field).to_be_focused()
    expect(field).to_have_value("Question two")
    field.fill("Something else")
    field.press("Escape")
    expect(field).to_have_count(0)
    assert shown(page) == before
    expect(page.get_by_role("group", name="Versions of this message")).to_have_count(0)
    expect(question(page, 1).get_by_role("button", name="Edit")).to_be_focused()
    # Sent as it was, it changes nothing either, and emptied it is not sent.
    edit(page, 1).press("Enter")
    assert shown(page) == before
    field = edit(page, 1)
    field.fill("  ")
    field.press("Enter")
    expect(field).to_be_visible()
    page.get_by_role("button", name="Cancel").click()
    assert shown(page) == before


def test_any_question_is_edited_and_its_branch_leafed_back_to(page: Page, served: Served) -> None:
    three(page, served)
    before = shown(page)
    until(lambda: len(kept_texts(served)) == 6)
    with says(served, "Another answer."):
        edit(page, 1).fill("Another question")
        page.keyboard.press("Enter")
        expect(page.locator(".prose").last).to_have_text("Another answer.")
        ended(page)
    other = [*before[:2], "Another question", "Another answer."]
    assert shown(page) == other
    expect(question(page, 1).get_by_role("group", name="Versions of this message")).to_contain_text("2 / 2")
    assert not Axe().run(page).response["violations"]
    until(lambda: kept_texts(served) == other)

    question(page, 1).get_by_role("button", name="Older version").click()
    expect(page.locator(".prose").last).to_have_text("Answer three.")
    assert shown(page) == before
    expect(question(page, 1).get_by_role("button", name="Older version")).to_be_focused()
    until(lambda: kept_texts(served) == before)

    # A third way, from what the first one's last question was; the forks nest.
    with says(served, "Deeper."):
        edit(page, 2).fill("Question four")
        page.keyboard.press("Enter")
        expect(page.locator(".prose").last).to_have_text("Deeper.")
        ended(page)
    deeper = [*before[:4], "Question four", "Deeper."]
    assert shown(page) == deeper
    until(lambda: kept_texts(served) == deeper)

    page.reload()
    ready(page)
    expect(page.locator(".prose").last).to_have_text("Deeper.")
    assert shown(page) == deeper
    question(page, 1).get_by_role("button", name="Newer version").click()
    expect(page.locator(".prose").last).to_have_text("Another answer.")
    question(page, 1).get_by_role("button", name="Newer version").press("Enter")  # there is none
    assert shown(page) == other
    question(page, 1).get_by_role("button", name="Older version").click()
    expect(page.locator(".prose").last).to_have_text("Deeper.")
    question(page, 2).get_by_role("button", name="Older version").click()
    expect(page.locator(".prose").last).to_have_text("Answer three.")
    assert shown(page) == before

    # And it goes on from there: the model is told the way that is shown.
    bodies = []
    page.on("request", lambda r: bodies.append(r.post_data_json) if r.url.endswith("/chat/completions") else None)
    with says(served, "Well."):
        ask(page, "And now?")
    assert [message["content"] for message in bodies[0]["messages"]] == [*before, "And now?"]
    until(lambda: kept_texts(served) == [*before, "And now?", "Well."])


def test_an_answer_anywhere_has_versions_and_a_failure_has_none(browser: Browser, served: Served) -> None:
    with watched(browser, f"{served.url}/", expected=("503", "404")) as page:
        three(page, served)
        before = shown(page)
        page.get_by_role("group", name="Answer", exact=True).first.hover()
        with says(served, "A second first answer."):
            page.get_by_role("button", name="Retry").first.click()
            expect(page.locator(".prose")).to_have_text(["A second first answer."])
            ended(page)
        versions = page.get_by_role("group", name="Versions of this answer")
        expect(versions).to_contain_text("2 / 2")
        page.route("**/v1/chat/completions", lambda route: route.fulfill(status=503, json={"error": {"message": "no"}}))
        page.get_by_role("button", name="Retry").click()
        expect(page.locator(".failure")).to_be_visible()
        expect(versions).to_contain_text("3 / 3")
        page.unroute("**/v1/chat/completions")
        with says(served, "A third."):
            page.get_by_role("button", name="Retry").click()
            expect(page.locator(".prose")).to_have_text(["A third."])
            ended(page)
        expect(versions).to_contain_text("3 / 3")
        for _ in range(2):
            page.get_by_role("button", name="Older version").click()
        expect(page.locator(".prose").last).to_have_text("Answer three.")
        assert shown(page) == before


def test_what_another_browser_writes_leaves_the_versions(page: Page, browser: Browser, served: Served) -> None:
    three(page, served)
    before = shown(page)
    with says(served, "Mine."):
        edit(page, 0).fill("My question")
        page.keyboard.press("Enter")
        expect(page.locator(".prose")).to_have_text(["Mine."])
        ended(page)
    until(lambda: kept_texts(served) == ["My question", "Mine."])
    page.wait_for_timeout(2500)  # what is later by less counts as one moment
    context = browser.new_context()
    other = context.new_page()
    other.goto(f"{served.url}/")
    ready(other)
    other.get_by_role("navigation").get_by_role("button", name="Question one", exact=True).click()
    expect(other.locator(".prose")).to_have_text(["Mine."])
    with says(served, "Theirs."):
        other.get_by_role("button", name="Retry").click()
        expect(other.locator(".prose")).to_have_text(["Theirs."])
        ended(other)
    until(lambda: kept_texts(served) == ["My question", "Theirs."])
    context.close()

    page.reload()
    ready(page)
    expect(page.locator(".prose")).to_have_text(["Theirs."])
    page.get_by_role("group", name="Versions of this answer").get_by_role("button", name="Older version").click()
    expect(page.locator(".prose")).to_have_text(["Mine."])
    question(page, 0).get_by_role("button", name="Older version").click()
    expect(page.locator(".prose").last).to_have_text("Answer three.")
    assert shown(page) == before
