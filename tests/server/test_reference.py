"""/docs and /tokenizer_info."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import jinja2

from tests.server.served import TEXT, serve


class _Tags(HTMLParser):
    """What a page consists of."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.addresses: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.opened.append(tag)
        self.addresses += [value for name, value in attrs if name in ("href", "src") and value]
        assert not any(name.startswith("on") or name == "style" for name, _ in attrs)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_reference_shows_every_route_and_needs_nothing_from_elsewhere() -> None:
    with serve(server={"api_key": "secret"}) as served, served.http() as http:
        answer = http.get("/docs")  # a browser has no key to send
        document = http.get("/openapi.json").json()
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        page = _Tags()
        page.feed(answer.text)
        assert "script" not in page.opened
        for path, methods in document["paths"].items():
            assert path in page.text
            for operation in methods.values():
                assert operation["description"].split("\n")[0] in page.text
        assert re.search(r"max_completion_tokens\s*integer", page.text)
        assert re.search(r"encoding_format\s*float \| base64", page.text)
        assert page.addresses
        for address in page.addresses:
            assert "//" not in address
            assert http.get(f"/{address}").status_code == 200
        assert http.get("/tokenizer_info").status_code == 401


def test_what_a_client_renders_by_tokenizer_info_is_what_the_server_renders() -> None:
    with serve(max_model_len=100) as served, served.http() as http:
        found = http.get("/tokenizer_info").json()
        messages = [{"role": "user", "content": "Hi"}]
        rendered = jinja2.Template(found["chat_template"]).render(messages=messages, add_generation_prompt=True)
        ids = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
        assert TEXT.encode(rendered, add_special_tokens=False) == ids
        assert found["model_max_length"] == 100
        assert {name: found[name] for name in TEXT.special_tokens} == TEXT.special_tokens
    with serve(tokenizer=False) as served, served.http() as http:
        assert http.get("/tokenizer_info").status_code == 400
