"""The page for everybody: by keyboard alone, by axe's rules, with a key, and when the server fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Route, expect

from tests.server.browser import chromium, ready, store, watched
from tests.server.served import Served, serve

pytestmark = pytest.mark.long

MARKDOWN = (
    "# One\n\nTwo [three](https://example.org) `four`\n\n- five\n\n```c\nint six;\n```\n\n> seven\n\n"
    "| a | b |\n|---|---|\n| c | d |"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(max_model_len=512, num_slots=512, latency=0.01) as served:
        yield served


def field(page: Page) -> Any:
    return page.get_by_role("textbox", name="Message")


def check(page: Page) -> None:
    """axe finds nothing, best practices included."""
    # What moves is between two colours; at rest the contrast counts.
    page.add_style_tag(content="*, ::before, ::after { transition: none !important; animation: none !important }")
    found = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    assert not [(one["id"], [node["html"] for node in one["nodes"]]) for one in found]


@pytest.mark.parametrize(
    ("size", "scheme"),
    # Each layout, and each colour on what only some layouts show: the narrow one has all of it.
    [((1360, 860), "light"), ((900, 700), "dark"), ((390, 844), "light"), ((390, 844), "dark")],
)
def test_axe_finds_nothing(browser: Browser, served: Served, scheme: Any, size: tuple[int, int]) -> None:
    options: dict[str, Any] = {"viewport": {"width": size[0], "height": size[1]}, "color_scheme": scheme}
    # axe itself makes elements from text, which the page's policy forbids
    with watched(browser, f"{served.url}/", bypass_csp=True, **options) as page:
        check(page)
        store(page, "kept", MARKDOWN)
        page.goto(f"{served.url}/#kept")
        page.reload()
        ready(page)
        expect(page.get_by_role("group", name="Answer", exact=True)).to_have_count(2)
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
        check(page)
        page.get_by_role("button", name="Settings").click()
        check(page)
        page.keyboard.press("Escape")
        if size[0] < 800:
            page.get_by_role("button", name="Conversations").click()
            check(page)
            page.keyboard.press("Escape")
            expect(page.get_by_role("button", name="Conversations")).to_be_focused()
        if size[0] < 1200:
            page.locator("#gauges-toggle").click()
            check(page)
            page.keyboard.press("Escape")
            expect(page.locator("#gauges-toggle")).to_be_focused()


FOCUSED = """() => {
    const e = document.activeElement;
    const style = getComputedStyle(e.closest(".composer") ?? e);
    const label = e.labels?.[0]?.textContent ?? "";
    return {
        id: e.id || e.className || e.localName,
        name: (e.getAttribute("aria-label") ?? label) || e.textContent.trim(),
        seen: style.outlineStyle !== "none" || style.boxShadow !== "none",
        inside: document.body.contains(e) && e !== document.body,
    };
}"""


def test_everything_by_keyboard(browser: Browser, served: Served) -> None:
    with watched(browser, f"{served.url}/", viewport={"width": 1360, "height": 860}) as page:
        store(page, "kept", MARKDOWN)
        page.goto(f"{served.url}/#kept")
        page.reload()
        ready(page)
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Skip to the message field")).to_be_focused()
        page.keyboard.press("Enter")
        expect(field(page)).to_be_focused()

        page.reload()
        ready(page)
        order = []
        for _ in range(60):
            page.keyboard.press("Tab")
            one = page.evaluate(FOCUSED)
            if not one["inside"]:
                break
            assert one["name"], one
            assert one["seen"], one
            order.append(one["id"])
        assert len(order) == len(set(order)) + order.count("tool") - 1
        for id in (
            "begin",
            "open-kept",
            "remove-kept",
            "shelf-open",
            "gauges-toggle",
            "settings-open",
            "scroll",
            "ask",
        ):
            assert id in order
        assert order.count("tool") >= 2
        assert {"edit-0", "retry-1"} <= set(order)
        reach = page.locator(
            "button:visible:enabled, a[href]:visible, input:visible, textarea:visible, [tabindex='0']:visible"
        )
        assert len(order) == reach.count()

        field(page).focus()
        page.keyboard.type("one")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("two")
        expect(field(page)).to_have_value("one\ntwo")
        page.keyboard.press("Enter")
        expect(page.get_by_role("group", name="You").last).to_contain_text("one\ntwo")
        expect(field(page)).to_be_focused()
        expect(page.get_by_role("button", name="Send")).to_be_visible()

        page.get_by_role("button", name="Settings").focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("dialog", name="Settings")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.get_by_role("button", name="Settings")).to_be_focused()


def test_an_answer_is_spoken_in_whole_sentences(browser: Browser, served: Served) -> None:
    pieces = ["It was ", "late. The ", "fox sle", "pt."]
    chunk = 'data: {"choices":[{"index":0,"delta":{"content":%s},"finish_reason":null}]}\n\n'
    end = 'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    body = "".join(chunk % json.dumps(piece) for piece in pieces) + end
    with watched(browser, f"{served.url}/") as page:
        page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
        field(page).fill("Well?")
        field(page).press("Enter")
        expect(page.locator("#spoken")).to_have_text("It was late. The fox slept.")
        expect(page.locator("#status")).to_have_text("Answer complete")
        assert page.locator("#spoken").get_attribute("aria-live") == "polite"
        assert page.locator(".prose").last.inner_text() == "It was late. The fox slept."


def test_settings_reach_the_request_and_survive(browser: Browser, served: Served) -> None:
    bodies: list[dict[str, Any]] = []

    def seen(route: Route) -> None:
        bodies.append(route.request.post_data_json)
        route.fulfill(body="data: [DONE]\n\n", content_type="text/event-stream")

    with watched(browser, f"{served.url}/") as page:
        page.route("**/v1/chat/completions", seen)
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("System prompt").fill("Be brief.")
        page.get_by_label("Temperature").fill("0.3")
        page.get_by_label("Top-p").fill("0.5")
        page.get_by_label("Longest answer, tokens").fill("33")
        page.get_by_label("Seed").fill("5")
        page.get_by_text("Dark", exact=True).click()
        page.reload()
        ready(page)
        assert page.evaluate("getComputedStyle(document.body).colorScheme") == "dark"
        for count, text in enumerate(("Hello", "again"), 1):
            field(page).fill(text)
            field(page).press("Enter")
            # the stream ended without a word and without a reason
            expect(page.locator(".failure")).to_have_count(count)
            expect(page.locator(".failure").last).to_contain_text("broke off")
    first, second = bodies
    assert first["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert second["messages"][1:] == [{"role": "user", "content": "Hello\n\nagain"}]
    wanted = {"temperature": 0.3, "top_p": 0.5, "max_tokens": 33, "seed": 5, "stream": True}
    assert wanted.items() <= first.items()
    assert first["prompt_cache_key"] == second["prompt_cache_key"]


def test_a_model_without_a_chat_template_goes_on_with_the_text(browser: Browser, served: Served) -> None:
    def plain(route: Route) -> None:
        answer = route.fetch()
        status = answer.json()
        status["model"] |= {"chat": False, "continues": True, "reads_system": False}
        route.fulfill(response=answer, json=status)

    prompts: list[str] = []
    with watched(browser, f"{served.url}/") as page:
        page.on(
            "request", lambda r: prompts.append(r.post_data_json["prompt"]) if r.url.endswith("completions") else None
        )
        page.route("**/engine/status", plain)
        page.reload()
        ready(page)
        page.get_by_role("button", name="Once upon a time").click()
        expect(page.get_by_role("button", name="Go on")).to_be_visible()
        first = page.evaluate("document.querySelector('.prose').textContent")
        assert first
        field(page).fill("Then")
        field(page).press("Enter")
        expect(page.locator(".exchange").nth(1).get_by_role("button", name="Go on")).to_be_visible()
        assert prompts[0] == "Once upon a time"
        assert prompts[1].startswith("Once upon a time")
        assert prompts[1].endswith("\n\nThen")


def test_a_key_is_asked_for_and_kept_for_the_tab(browser: Browser) -> None:
    with (
        serve({"api_key": "right"}, max_model_len=2048, num_slots=512) as served,
        watched(browser, f"{served.url}/", expected=("401",)) as page,
    ):
        dialog = page.get_by_role("dialog", name="This server asks for a key")
        dialog.get_by_label("API key").fill("wrong")
        dialog.get_by_role("button", name="Continue").click()
        expect(dialog.get_by_role("alert")).to_have_text("The server does not accept this key.")
        dialog.get_by_label("API key").fill("right")
        page.keyboard.press("Enter")
        expect(dialog).to_be_hidden()
        field(page).fill("Hello")
        field(page).press("Enter")
        expect(page.get_by_role("button", name="Retry")).to_be_visible()
        assert page.locator(".failure").all_inner_texts() == []
        page.reload()
        ready(page)
        expect(dialog).to_be_hidden()
        assert page.evaluate("sessionStorage['cellar.key']") == "right"
        assert "right" not in page.evaluate("JSON.stringify(localStorage)")

        # A key that is taken back later is asked for again, and the message goes on its way.
        page.evaluate("sessionStorage['cellar.key'] = 'old'")
        page.reload()
        ready(page)
        field(page).fill("Still there?")
        field(page).press("Enter")
        dialog.get_by_label("API key").fill("right")
        page.keyboard.press("Enter")
        expect(page.get_by_role("button", name="Retry")).to_have_count(2)
        assert page.locator(".failure").all_inner_texts() == []


def test_what_fails_is_said_and_can_be_tried_again(browser: Browser, served: Served) -> None:
    error = {"error": {"message": "the engine is down and being started again; try again soon."}}
    with watched(browser, f"{served.url}/", expected=("503", "ERR_FAILED")) as page:
        page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(status=503, headers={"retry-after": "5"}, json=error),
        )
        field(page).fill("Hello")
        field(page).press("Enter")
        expect(page.locator(".failure")).to_have_text(
            "The engine is down and being started again; try again soon. It may work again in 5 s."
        )
        page.unroute("**/v1/chat/completions")
        page.route("**/v1/chat/completions", lambda route: route.abort())
        page.get_by_role("button", name="Retry").click()
        expect(page.locator(".failure")).to_have_text("The server cannot be reached.")
        page.unroute("**/v1/chat/completions")
        page.get_by_role("button", name="Retry").click()
        expect(page.locator(".failure")).to_have_count(0)
        expect(page.locator(".prose")).not_to_be_empty()

        page.route("**/engine/status", lambda route: route.abort())
        expect(page.locator("#model")).to_have_text("The server does not answer")
        page.unroute("**/engine/status")
        expect(page.locator("#model")).to_have_text("fake")


def test_without_storage_it_still_works(browser: Browser, served: Served) -> None:
    with watched(browser, f"{served.url}/") as page:
        page.add_init_script("Object.defineProperty(window, 'indexedDB', { get() { throw new Error('no') } })")
        page.reload()
        ready(page)
        expect(page.get_by_text("This browser keeps no conversations")).to_be_visible()
        field(page).fill("Hello")
        field(page).press("Enter")
        expect(page.get_by_role("button", name="Retry")).to_be_visible()
