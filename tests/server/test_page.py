"""The page's files and the status it draws, without a browser."""

from __future__ import annotations

import logging
import re
import tomllib
from pathlib import Path

import pytest

from cellar.server.page import DIRECTORY, page_files
from cellar.server.status import EngineStatus, template_facts
from cellar.text.chat import ChatTemplate
from tests.server.served import MODEL, serve

ROOT = Path(__file__).parents[2]
TEXTS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
TYPES = {**{ending: f"{kind}; charset=utf-8" for ending, kind in TEXTS.items()}, "woff2": "font/woff2"}
OWN = sorted(path for path in DIRECTORY.iterdir() if path.is_file())


@pytest.mark.long
def test_every_file_is_served_with_its_type_and_can_be_kept() -> None:
    with serve() as served, served.http() as http:
        for path in ["/", *(f"/page/{name}" for name in page_files() if name != "index.html")]:
            first = http.get(path)
            ending = "html" if path == "/" else path.rpartition(".")[2]
            assert first.status_code == 200
            assert first.headers["content-type"] == TYPES[ending]
            assert first.headers["cache-control"] == "no-cache"
            tag = first.headers["etag"]
            for held in (tag, f"W/{tag}", f'"other", {tag}', "*"):
                again = http.get(path, headers={"if-none-match": held})
                assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
            assert http.get(path, headers={"if-none-match": '"other"'}).content == first.content
            head = http.head(path)
            assert (head.content, head.headers["content-length"]) == (b"", str(len(first.content)))


def test_nothing_else_is_served() -> None:
    with serve() as served, served.http() as http:
        for path in (
            "/page/index.html",
            "/page/none.js",
            "/page/libraries/LICENSE-katex",
            "/page/libraries/",
            "/page/..%2fapp.py",
            "/page/",
            "/page/%2e%2e/app.py",
        ):
            assert http.get(path).status_code == 404, path


def test_the_policy_allows_nothing_from_elsewhere() -> None:
    with serve() as served, served.http() as http:
        policy = http.get("/").headers["content-security-policy"]
    rules = dict(rule.strip().partition(" ")[::2] for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert {rules[f"{kind}-src"] for kind in ("script", "style", "img", "font", "connect")} == {"'self'"}
    assert rules["require-trusted-types-for"] == "'script'"


def test_the_files_name_no_other_host_and_parse_no_html() -> None:
    for path in OWN:
        text = path.read_text(encoding="utf-8")
        assert set(re.findall(r"https?://[\w.]+", text)) <= {"http://www.w3.org"}, path.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\bon\w+=\"|style=\"", text), (
            path.name
        )


def test_what_a_file_names_is_there() -> None:
    names = set(page_files())
    there = [path for path in DIRECTORY.rglob("*") if path.is_file() and not path.name.startswith("LICENSE-")]
    assert names == {path.relative_to(DIRECTORY).as_posix() for path in there}
    for path in OWN:
        text = path.read_text(encoding="utf-8")
        named = re.findall(r'(?:from |import\()"\./([\w./-]+)"', text)
        named += re.findall(r'(?:href="|src="|href: ")page/([\w./-]+)"', text)
        assert set(named) <= names, path.name
        if path.name == "index.html":
            ids = re.findall(r'\bid="([\w-]+)"', text)
            assert len(ids) == len(set(ids))
            for script in DIRECTORY.glob("*.js"):
                used = re.findall(r'byId\("([\w-]+)"\)', script.read_text(encoding="utf-8"))
                assert set(used) <= set(ids), script.name


def test_the_files_go_into_the_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["tool"]["setuptools"]["package-data"]["cellar.server"] == [
        "page/*",
        "page/libraries/*",
        "page/libraries/fonts/*",
    ]


def test_the_libraries_have_what_they_name_and_their_licences() -> None:
    """Fonts are there, nothing is asked of another host, and each library stands beside its licence."""
    libraries = DIRECTORY / "libraries"
    style = (libraries / "katex.css").read_text(encoding="utf-8")
    fonts = set(re.findall(r"url\(([^)]+)\)", style))
    assert fonts == {f"fonts/{path.name}" for path in (libraries / "fonts").iterdir()}
    for name in ("markdown-it", "highlight", "katex", "katex-fonts"):
        assert "Permission" in (libraries / f"LICENSE-{name}").read_text(encoding="utf-8") or name == "highlight"
    for path in libraries.glob("*.js"):
        assert not re.search(r"XMLHttpRequest|importScripts|sendBeacon", path.read_text(encoding="utf-8")), path.name
    size = sum(path.stat().st_size for path in libraries.rglob("*") if path.is_file())
    assert size < 900_000


def test_page_and_status_need_no_key() -> None:
    with serve({"api_key": "secret"}) as served, served.http() as http:
        assert http.get("/").status_code == 200
        assert http.get("/page/main.js").status_code == 200
        assert http.get("/engine/status").json()["key_required"] is True
        assert http.get("/v1/models").status_code == 401
        assert http.get("/pages").status_code == 401


def test_status_counts_what_was_done() -> None:
    with serve() as served, served.http() as http:
        before = http.get("/engine/status")
        assert before.headers["cache-control"] == "no-store"
        assert before.json()["model"]["name"] == MODEL
        assert before.json()["key_required"] is False
        for _ in range(2):
            body = {"prompt": list(range(3, 43)), "max_tokens": 8, "ignore_eos": True}
            assert http.post("/v1/completions", json=body).status_code == 200
        served.settle()
        then, now = before.json(), http.get("/engine/status").json()
        engine = now["engine"]
        assert now["time"] > then["time"]
        assert engine["generation_tokens"] - then["engine"]["generation_tokens"] == 16
        assert engine["prefix_hits"] > 0
        (tier,) = engine["memory"]
        assert tier["used_chunks"] == 0
        assert 0 < tier["cached_chunks"] <= tier["chunks"] == 64


class NoEngine:
    """A host whose engine is down."""

    llm = None

    def stats(self) -> None:
        return None


def test_status_without_an_engine() -> None:
    with serve() as served:
        model = served.app.state.api.model
    assert EngineStatus(NoEngine(), model, False, None).now()["engine"] is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("template", "facts"),
    [
        (None, (False, False, True)),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", (True, True, False)),
        (
            "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}",
            (True, False, True),
        ),
        (
            "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}<{{ m.content }}>"
            "{% endfor %}",
            (True, False, False),
        ),
    ],
)
def test_facts_of_templates(template: str | None, facts: tuple[bool, bool, bool]) -> None:
    found = template_facts(ChatTemplate(template))
    assert (found["chat"], found["reads_system"], found["continues"]) == facts


def test_looking_every_second_is_not_logged() -> None:
    with serve():
        pass
    log = logging.getLogger("uvicorn.access")

    def kept(path: str) -> bool:
        line = '%s - "%s %s HTTP/%s" %d'
        return bool(log.filter(logging.makeLogRecord({"msg": line, "args": ("host:1", "GET", path, "1.1", 200)})))

    assert not kept("/engine/status")
    assert kept("/v1/models")
