"""The page's markdown, in Chromium: what it makes of a text at once, and bit by bit."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page

from tests.server.browser import chromium, watched
from tests.server.served import serve

pytestmark = pytest.mark.long

RENDER = """async ([pieces, last]) => {
    const { MarkdownView } = await import("/page/render.js");
    const place = document.createElement("div");
    const view = new MarkdownView(place);
    let text = "";
    for (const piece of pieces) view.update(text += piece, true);
    if (last) view.update(text, false);
    for (const button of place.querySelectorAll("button")) button.remove();
    return place.innerHTML;
}"""


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with serve() as served, chromium() as browser, watched(browser, served.url) as page:
        yield page


def rendered(page: Page, *pieces: str, last: bool = True) -> str:
    html: str = page.evaluate(RENDER, [list(pieces), last])
    return html


LINK = 'target="_blank" rel="noopener noreferrer nofollow"'


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("", ""),
        ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
        ("# A\n## B *c*\n#no", '<h2 class="level-1">A</h2><h3 class="level-2">B <em>c</em></h3><p>#no</p>'),
        (
            "a *b* _c_ **d** __e__ ~~f~~ `g`",
            "<p>a <em>b</em> <em>c</em> <strong>d</strong> <strong>e</strong> <del>f</del> <code>g</code></p>",
        ),
        ("***both*** and **a *b* c**", "<p><em><strong>both</strong></em> and <strong>a <em>b</em> c</strong></p>"),
        ("2 * 3 * 4, snake_case_name, 5*6*7", "<p>2 * 3 * 4, snake_case_name, 5<em>6</em>7</p>"),
        ("**open and *closed*", "<p>**open and <em>closed</em></p>"),
        ("`a` ``b ` c`` `open", "<p><code>a</code> <code>b ` c</code> `open</p>"),
        (r"\*no\* \` &amp; &lt;b&gt; &unknown;", "<p>*no* ` &amp; &lt;b&gt; &amp;unknown;</p>"),
        (
            "- a\n- b\n  - c\n\n    d\n- e",
            '<ul class="tight"><li><p>a</p></li><li><p>b</p><ul class="loose"><li><p>c</p><p>d</p></li></ul></li>'
            "<li><p>e</p></li></ul>",
        ),
        ("1. a\n2. b\n\n7) c", "<ol class=\"tight\"><li><p>a</p></li><li><p>b</p></li></ol>"
         '<ol class="tight" start="7"><li><p>c</p></li></ol>'),
        ("- a\n\n- b", '<ul class="loose"><li><p>a</p></li><li><p>b</p></li></ul>'),
        ("text\n- item\n\nmore", '<p>text</p><ul class="tight"><li><p>item</p></li></ul><p>more</p>'),
        ("in\n1986. a year", "<p>in<br>1986. a year</p>"),
        ("---\n***\n- - -", "<hr><hr><hr>"),
        ("> a\nb\n> > c\n\nd", "<blockquote><p>a<br>b</p><blockquote><p>c</p></blockquote></blockquote><p>d</p>"),
        ("[a *b*](https://x.org/y_(z)_1 \"title\")", f'<p><a href="https://x.org/y_(z)_1" {LINK}>a <em>b</em></a></p>'),
        ("see https://x.org/a_b?c=1&d=2.", f'<p>see <a href="https://x.org/a_b?c=1&amp;d=2" {LINK}>https://x.org/a_b?c=1&amp;d=2</a>.</p>'),
        ("(https://x.org/a)", f'<p>(<a href="https://x.org/a" {LINK}>https://x.org/a</a>)</p>'),
        ("<https://x.org> <me@x.org>", f'<p><a href="https://x.org" {LINK}>https://x.org</a> '
         f'<a href="mailto:me@x.org" {LINK}>me@x.org</a></p>'),
        ("![a picture](https://x.org/p.png)", f'<p><a href="https://x.org/p.png" {LINK}>a picture</a></p>'),
        ("[a](b.html) [c] [d](", "<p>a [c] [d](</p>"),
        ("a<br>b<BR/>c", "<p>a<br>b<br>c</p>"),
        ("It costs $5 and $10, or 3$.", "<p>It costs $5 and $10, or 3$.</p>"),
        ("Title\n---\n    not code", '<p>Title</p><hr><p>not code</p>'),
    ],
)  # fmt: skip
def test_what_comes_of_a_text(page: Page, text: str, html: str) -> None:
    assert rendered(page, text) == html


def test_code(page: Page) -> None:
    html = rendered(page, "```python\nif a < b:\n\n    *c*\n```\n~~~\n```\n~~~\n````\nopen")
    assert html.count("<pre") == 3
    assert 'aria-label="Code, python"' in html
    assert "<code>if a &lt; b:\n\n    *c*</code>" in html
    assert "<code>```</code>" in html
    assert "<code>open</code>" in html
    assert rendered(page, "1. a\n   ```\n   b\n     c\n   ```\n2. d").count("<li>") == 2


COLOURED = """async ([pieces, language]) => {
    const { MarkdownView } = await import("/page/render.js");
    const place = document.createElement("div");
    document.body.append(place);
    const view = new MarkdownView(place);
    let text = "```" + language + "\\n";
    for (const piece of pieces) {
        view.update(text += piece, true);
        await new Promise((done) => setTimeout(done, 400));
    }
    const grown = place.querySelectorAll("code span").length;
    view.update(text += "\\n```\\n\\nDone.", false);
    while (language && !place.querySelector("code span")) await new Promise((done) => setTimeout(done, 20));
    const spans = [...place.querySelectorAll("code span")].map((one) => [one.className, one.textContent]);
    const shown = place.querySelector("code").textContent;
    place.remove();
    return [grown, spans, shown];
}"""


def test_code_has_colours_also_while_it_is_written(page: Page) -> None:
    grown, spans, shown = page.evaluate(COLOURED, [["def f(x):\n", "    return 'a<b>'  # c\n", "f(1)"], "python"])
    assert grown > 3
    assert shown == "def f(x):\n    return 'a<b>'  # c\nf(1)"
    assert ["c-keyword", "def"] in spans
    assert ["c-string", "'a<b>'"] in spans
    assert ["c-comment", "# c"] in spans
    assert page.evaluate(COLOURED, [["<b onclick=x>y</b>"], "html"])[1]
    assert page.evaluate(COLOURED, [["x = 1"], ""]) == [0, [], "x = 1"]


FORMULAS = """async (text) => {
    const { MarkdownView } = await import("/page/render.js");
    const place = document.createElement("div");
    document.body.append(place);
    const view = new MarkdownView(place);
    for (let k = 1; k < text.length; k += 3) view.update(text.slice(0, k), true);
    view.update(text, false);
    const formulas = [...place.querySelectorAll(".math")];
    const settled = (one) => one.querySelector(".katex") || one.classList.contains("source");
    while (!formulas.every(settled)) await new Promise((done) => setTimeout(done, 20));
    await document.fonts.ready;
    const found = formulas.map((one) => [
        one.classList.contains("display"), one.querySelector("annotation")?.textContent ?? null,
        one.getBoundingClientRect().height > 0,
    ]);
    const rest = place.cloneNode(true);
    for (const one of rest.querySelectorAll(".math")) one.replaceWith("#");
    const styled = [...document.styleSheets].some((one) => one.href?.endsWith("katex.css"));
    place.remove();
    return [found, rest.innerHTML, styled];
}"""


@pytest.mark.parametrize(
    ("text", "formulas", "rest"),
    [
        ("is $a_1*b_1$ or \\(c*d*e\\).", [(False, "a_1*b_1"), (False, "c*d*e")], "<p>is # or #.</p>"),
        ("so\n$$\nx^2\n+ 1\n$$\nand", [(True, "x^2\n+ 1")], "<p>so</p>#<p>and</p>"),
        ("\\[ \\frac{1}{2} \\]\n\n- $$x$$ it", [(True, "\\frac{1}{2}"), (True, "x")],
         '#<ul class="tight"><li><p># it</p></li></ul>'),
        ("| $a$ |\n|-|\n| $\\text{b}$ |", [(False, "a"), (False, "\\text{b}")],
         '<div class="table" tabindex="0" role="region" aria-label="Table"><table><thead><tr><th scope="col">#</th>'
         '</tr></thead><tbody><tr><td>#</td></tr></tbody></table></div>'),
        ("`$a$` and $5 or $6, \\$x", [], "<p><code>$a$</code> and $5 or $6, $x</p>"),
        ("$$\nopen\n\nnot *math*", [], "<p>$$<br>open</p><p>not <em>math</em></p>"),
    ],
)  # fmt: skip
def test_mathematics(page: Page, text: str, formulas: list[tuple[bool, str]], rest: str) -> None:
    found, html, styled = page.evaluate(FORMULAS, text)
    assert [tuple(one) for one in found] == [(*one, True) for one in formulas]
    assert html == rest
    assert styled or not formulas


def test_a_formula_that_is_none_stays_as_it_was(page: Page) -> None:
    found, _, _ = page.evaluate(FORMULAS, "$\\frac{1$ and $\\href{javascript:alert(1)}{x}$")
    assert found[0] == [False, None, True]
    assert page.evaluate("document.querySelectorAll('a[href^=javascript]').length") == 0


def test_a_title_has_no_marks(page: Page) -> None:
    plain = "async (text) => (await import('/page/conversation.js')).titleOf(text)"
    for text, title in (
        ("What is **Gauss'** `integral`?\n\nPlease.", "What is Gauss' integral? Please."),
        ("# Read [this](https://x.org)\n- a\n- *b*", "Read this a b"),
        ("```python\nx = 1\n```", "x = 1"),
        ("2 * 3 * 4 <b>", "2 * 3 * 4 <b>"),
        ("***", "***"),
    ):
        assert page.evaluate(plain, text) == title


def test_tables(page: Page) -> None:
    html = rendered(page, "| a | b |\n|:--|--:|\n| `c\\|d` | e\\|f |\n| g |\n\nafter | this")
    assert '<th class="to-left" scope="col">a</th><th class="to-right" scope="col">b</th>' in html
    assert '<td class="to-left"><code>c|d</code></td><td class="to-right">e|f</td>' in html
    assert '<td class="to-left">g</td><td class="to-right"></td>' in html
    assert html.endswith("<p>after | this</p>")
    assert "<table>" not in rendered(page, "a | b\n- | - | -\n")


@pytest.mark.parametrize(
    "text",
    [
        "<img src=x onerror=alert(1)>",
        "<script>alert(1)</script>",
        "[a](javascript:alert(1)) [b](JaVaScRiPt:x) [c](data:text/html,x) [d](vbscript:x) [e]( javascript:x )",
        "<javascript:alert(1)> ![x](data:image/svg+xml,x)",
        "`<b>` **<i onclick=x>** | <u> |\n|-|\n| <a href=x> |",
        "```<img src=x>\n</code></pre><script>x</script>\n```",
        '[x](https://a.org/"onmouseover="alert(1))',
    ],
)
def test_no_text_becomes_anything_but_text(page: Page, text: str) -> None:
    html = rendered(page, text)
    allowed = {"p", "br", "em", "strong", "code", "a", "figure", "figcaption", "span", "pre", "div", "table"} | {
        *("thead", "tbody", "tr", "th", "td"),
    }
    found = page.evaluate(
        """async (text) => {
            const { MarkdownView } = await import("/page/render.js");
            const place = document.createElement("div");
            new MarkdownView(place).update(text, false);
            for (const button of place.querySelectorAll("button")) button.remove();
            return [...place.querySelectorAll("*")].map((e) => [e.localName, e.href ?? "", e.getAttributeNames()]);
        }""",
        text,
    )
    for name, href, attributes in found:
        assert name in allowed, html
        assert href == "" or href.startswith("https://"), html
        assert not [a for a in attributes if a.startswith("on") or a == "src"], html


WORDS = [
    *("word ", "other", "*", "**", "_", "`", "``", "```", "\n", "\n\n", "- ", "1. ", "  ", "    ", "> ", "# ", "|"),
    *("\n|-|-|\n", "[", "](", ")", "https://x.org", "~~", "\\", "<", "&amp;", "---", ":", "!", '"', "\n- ", "ß🙂"),
]  # fmt: skip


def test_bit_by_bit_comes_to_the_same(page: Page) -> None:
    rng = random.Random(7)
    for _ in range(1500):
        text = "".join(rng.choices(WORDS, k=rng.randint(1, 60)))
        cuts = sorted(rng.sample(range(len(text) + 1), k=min(len(text), rng.randint(1, 20))))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert rendered(page, *pieces) == rendered(page, text), (text, pieces)


def test_what_is_still_written_looks_as_it_will(page: Page) -> None:
    assert rendered(page, "so **stro", last=False) == "<p>so <strong>stro</strong></p>"
    assert rendered(page, "so `co", last=False) == "<p>so <code>co</code></p>"
    assert rendered(page, "see [this](https://x.o", last=False) == "<p>see this</p>"
    assert rendered(page, "so **stro") == "<p>so **stro</p>"


COST = """async ([block, count]) => {
    const { MarkdownView } = await import("/page/render.js");
    const place = document.createElement("div");
    const view = new MarkdownView(place);
    let made = 0;
    const watcher = new MutationObserver((seen) => { for (const one of seen) made += one.addedNodes.length; });
    watcher.observe(place, { childList: true, subtree: true });
    const per = [];
    let text = "";
    for (let k = 0; k < count; k++) {
        made = 0;
        for (const word of block.split(/(?<= )/)) { view.update(text += word, true); }
        await 0;
        made += watcher.takeRecords().reduce((sum, one) => sum + one.addedNodes.length, 0);
        per.push(made);
    }
    return [per, place.firstChild.isConnected, place.textContent.length];
}"""


@pytest.mark.parametrize(
    "block", ["Some words in a paragraph with *one* mark and `code`.\n\n", "- an item of a list\n"]
)
def test_a_long_answer_costs_no_more_per_word(page: Page, block: str) -> None:
    per, _, length = page.evaluate(COST, [block, 300])
    assert length > 300 * 15
    assert sum(per[-50:]) <= 1.2 * sum(per[10:60])


def test_one_long_block_is_only_added_to(page: Page) -> None:
    per, _, length = page.evaluate(COST.replace('let text = ""', 'let text = "```\\n"'), ["a = b\n", 500])
    assert length > 2500
    assert sum(per[-100:]) == 0
