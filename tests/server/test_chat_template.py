"""--chat-template: a file's template instead of the model's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from cellar.core.errors import ConfigError
from cellar.server.config import ServerConfig
from tests.fake_front import TEMPLATE
from tests.server.served import TEXT, serve

PIRATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}, arr!\n{% endfor %}{{ bos_token }}"


@pytest.mark.parametrize("own", [None, TEMPLATE])
def test_a_file_takes_the_place_of_the_models_template(tmp_path: Path, own: str | None) -> None:
    file = tmp_path / "pirate.jinja"
    file.write_text(PIRATE, encoding="utf-8")
    body = {"messages": [{"role": "user", "content": "Ahoy"}], "add_generation_prompt": False}
    with serve({"chat_template": str(file)}, template=own, max_model_len=512) as served, served.http() as http:
        told = http.post("/tokenize", json=body).json()
        rendered = "[user] Ahoy, arr!\n" + TEXT.special_tokens.get("bos_token", "")
        assert told["tokens"] == TEXT.encode(rendered, add_special_tokens=False)
        chat = http.post("/v1/chat/completions", json={"messages": body["messages"], "max_tokens": 3})
        assert chat.json()["usage"]["prompt_tokens"] == told["count"]
        assert http.get("/engine/status").json()["model"]["chat"] is True


def test_a_file_that_is_no_template_is_refused(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.jinja"
    wrong.write_text("{% for %}", encoding="utf-8")
    for file in (wrong, tmp_path / "absent.jinja", tmp_path):
        with pytest.raises(ConfigError, match="Give chat_template a file with a Jinja template"):
            ServerConfig(chat_template=str(file))
