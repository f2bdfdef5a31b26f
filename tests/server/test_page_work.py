"""What the page does besides talking: settings of a conversation, files, import, keys, and long conversations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.server.browser import chromium, ready, watched
from tests.server.served import Served, serve
from tests.server.spoken import HYBRID, says
from tests.server.test_page_access import check
from tests.server.test_page_branches import ask, edit, ended, shown

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    kept = {"data_dir": str(tmp_path_factory.mktemp("data"))}
    with serve(kept, template=HYBRID, max_model_len=65536, num_slots=4096) as served:
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, served: Served) -> Iterator[Page]:
    with watched(browser, f"{served.url}/", expected=("404",), accept_downloads=True, bypass_csp=True) as page:
        yield page


def bodies_of(page: Page) -> list[dict[str, Any]]:
    """The bodies of all chat requests from now on."""
    bodies: list[dict[str, Any]] = []
    page.on("request", lambda r: bodies.append(r.post_data_json) if r.url.endswith("/chat/completions") else None)
    return bodies


def test_each_conversation_has_its_settings(page: Page, served: Served) -> None:
    bodies = bodies_of(page)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Be a fox.")
    page.get_by_text("More ways to choose words").click()
    for label, value in (
        ("Top-k", "40"),
        ("Min-p", "0.05"),
        ("Shortest answer", "1"),
        ("Presence penalty", "0.5"),
        ("Frequency penalty", "-0.25"),
        ("Repetition penalty", "1.1"),
        ("Stop at, one text per line", "THE END\nFin."),
    ):
        page.get_by_label(label).fill(value)
    check(page)
    page.keyboard.press("Escape")
    with says(served, "A fox."):
        ask(page, "Who are you?")
    page.get_by_role("button", name="New conversation").click()
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_label("System prompt")).to_have_value("Be a fox.")  # what was set last
    page.get_by_role("button", name="Back to defaults").click()
    page.get_by_label("System prompt").fill("Be a badger.")
    page.keyboard.press("Escape")
    with says(served, "A badger."):
        ask(page, "And you?")
    page.reload()
    ready(page)
    page.get_by_role("navigation").get_by_role("button", name="Who are you?", exact=True).click()
    with says(served, "Still."):
        ask(page, "Still?")
    first, second, third = bodies
    samplers = {"top_k": 40, "min_p": 0.05, "min_tokens": 1, "presence_penalty": 0.5, "frequency_penalty": -0.25}
    samplers |= {"repetition_penalty": 1.1, "stop": ["THE END", "Fin."]}
    assert samplers.items() <= first.items()
    assert samplers.items() <= third.items()
    assert not samplers.keys() & second.keys()
    assert [body["messages"][0]["content"] for body in bodies] == ["Be a fox.", "Be a badger.", "Be a fox."]


def test_text_files_go_with_a_message(page: Page, served: Served, tmp_path: Path) -> None:
    notes, binary, large = tmp_path / "notes.md", tmp_path / "x.bin", tmp_path / "large.txt"
    notes.write_text("# Notes\n\n```c\nint x;\n```\n", encoding="utf-8")
    binary.write_bytes(b"\x00\xff\xfe")
    large.write_text("x" * 1_000_001, encoding="utf-8")
    bodies = bodies_of(page)
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Add text files").click()
    chooser.value.set_files([notes])
    expect(page.get_by_role("list", name="Files of this message")).to_contain_text("notes.md")
    for path, wrong in ((binary, "x.bin is not a text file."), (large, "large.txt is larger than 1 MB.")):
        page.locator("#attach-field").set_input_files(path)
        expect(page.locator("#files-wrong")).to_have_text(wrong)
    check(page)
    # One is dropped anywhere on the page, and left out again.
    page.evaluate(
        """() => {
            const data = new DataTransfer();
            data.items.add(new File(["dropped"], "dropped.txt"));
            const how = { dataTransfer: data, bubbles: true, cancelable: true };
            for (const type of ["dragover", "drop"]) document.body.dispatchEvent(new DragEvent(type, how));
        }"""
    )
    page.get_by_role("button", name="Leave out dropped.txt").click()
    expect(page.get_by_role("list", name="Files of this message").get_by_role("listitem")).to_have_count(1)
    with says(served, "Notes."):
        ask(page, "What is it?")
    expect(page.get_by_role("list", name="Files of this message")).to_be_hidden()
    wanted = "notes.md:\n````\n# Notes\n\n```c\nint x;\n```\n````\n\n"
    assert bodies[0]["messages"][-1]["content"] == wanted + "What is it?"
    page.get_by_text("notes.md").click()
    expect(page.get_by_role("region", name="notes.md")).to_contain_text("int x;")
    check(page)
    with says(served, "C."):
        edit(page, 0).fill("Which language?")
        page.keyboard.press("Enter")
        expect(page.locator(".prose")).to_have_text(["C."])
        ended(page)
    assert bodies[1]["messages"][-1]["content"] == wanted + "Which language?"


def test_an_exported_conversation_is_imported_with_its_versions(
    page: Page, browser: Browser, served: Served, tmp_path: Path
) -> None:
    with says(served, "<think>Hm.</think>One."):
        ask(page, "First")
    with says(served, "Two."):
        edit(page, 0).fill("Second")
        page.keyboard.press("Enter")
        expect(page.locator(".prose")).to_have_text(["Two."])
        ended(page)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export: First").click()
    saved = tmp_path / "it.json"
    download.value.save_as(saved)
    plain = tmp_path / "plain.json"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"text": "Hello"}]}]
    plain.write_text(json.dumps([*messages, {"role": "assistant", "content": "Hi."}]), encoding="utf-8")
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"messages": [{"role": "tool"}]}', encoding="utf-8")
    assert '"item"' not in saved.read_text(encoding="utf-8")

    with watched(browser, f"{served.url}/", expected=("404",)) as other:
        field = other.locator("#import-field")
        field.set_input_files(saved)
        expect(other.locator(".prose")).to_have_text(["Two."])
        other.get_by_role("button", name="Older version").click()
        expect(other.locator(".prose")).to_have_text(["One."])
        assert shown(other) == ["First", "One."]
        expect(other.locator("details.thought")).to_contain_text("Hm.")
        field.set_input_files(plain)
        expect(other.locator(".prose")).to_have_text(["Hi."])
        expect(other.get_by_role("heading", level=1)).to_have_text("Hello")
        expect(other.locator("#system")).to_have_value("Be brief.")
        field.set_input_files(wrong)
        dialog = other.get_by_role("alertdialog", name="This file is no conversation")
        expect(dialog).to_contain_text("wrong.json: it has no messages.")
        dialog.get_by_role("button", name="Close").click()


def test_keys(page: Page, served: Served) -> None:
    message = page.get_by_role("textbox", name="Message", exact=True)
    with says(served, "One."):
        ask(page, "First")
    message.press("ArrowUp")
    field = page.get_by_role("textbox", name="Edit your message")
    expect(field).to_be_focused()
    expect(field).to_have_value("First")
    field.press("Escape")
    message.fill("not empty")
    message.press("ArrowUp")
    expect(field).to_have_count(0)
    page.keyboard.press("Control+/")
    sheet = page.get_by_role("dialog", name="Keyboard shortcuts")
    expect(sheet).to_contain_text("New conversation")
    check(page)
    page.keyboard.press("Escape")
    expect(sheet).to_be_hidden()
    page.keyboard.press("Control+k")
    expect(page.get_by_label("Search conversations")).to_be_focused()
    page.keyboard.press("Control+Shift+O")
    expect(page.locator(".exchange")).to_have_count(0)
    expect(message).to_be_focused()
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Keyboard shortcuts").click()
    expect(sheet).to_be_visible()


LONG = """async ([turns, words, code]) => {
    const { Store } = await import("/page/store.js");
    const store = new Store();
    await store.open();
    const all = [];
    for (let k = 0; k < turns; k += 2) {
        const text = `Answer ${k}, **bold** and $x_${k}$.` + "\\n\\n" + (k % 10 ? words : code);
        all.push({ role: "user", text: `Question ${k}` }, { role: "assistant", finish: "stop", text });
    }
    await store.save({ id: "long", created: 0, updated: Date.now(), title: "Long", turns: all });
}"""
CODE = "```python\ndef f(x):\n    return x  # it\n```\n\n$$\\int_0^1 x\\,dx$$\n\n| a | b |\n|-|-|\n| c | d |"


def test_two_hundred_turns(page: Page, served: Served) -> None:
    page.evaluate(LONG, [200, "Words and words. " * 40, CODE])
    page.goto(f"{served.url}/#long")
    page.reload()
    ready(page)
    expect(page.locator(".exchange")).to_have_count(100)
    expect(page.locator(".exchange").last.get_by_role("button", name="Retry")).to_be_in_viewport()
    page.evaluate(
        """() => {
            window.made = 0;
            const count = (seen) => { for (const one of seen) window.made += one.addedNodes.length; };
            new MutationObserver(count).observe(document.getElementById("exchanges"), { childList: true });
        }"""
    )
    with says(served, "The last answer."):
        page.get_by_role("textbox", name="Message", exact=True).fill("One more?")
        page.keyboard.press("Enter")
        expect(page.locator(".prose").last).to_have_text("The last answer.")
        ended(page)
    # The exchange before it is no longer the last; all others stay as they are.
    assert 1 <= page.evaluate("window.made") <= 6
    expect(page.locator(".prose").last).to_be_in_viewport()
    field = edit(page, 0)
    expect(field).to_be_in_viewport()
    field.press("Escape")
    page.get_by_label("Search conversations").fill("Question 78")
    expect(page.get_by_role("navigation").get_by_role("listitem")).to_have_count(1)
