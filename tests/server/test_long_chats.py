"""A chat that comes back with every turn: only what is new is tokenized, and its ids are those of a cold start."""

from __future__ import annotations

import re

import pytest

from tests.fake_front import ROOMY
from tests.server.served import TEXT, Served, serve

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def _count(served: Served, stem: str) -> float:
    with served.http() as http:
        (found,) = re.findall(rf"^cellar:{stem}_total{{.*}} (\S+)$", http.get("/metrics").text, re.MULTILINE)
    return float(found)


@pytest.mark.long
def test_a_long_chat_is_tokenized_turn_by_turn() -> None:
    messages: list[dict[str, str]] = []
    with serve(**ROOMY, template=CHATML) as served, served.http() as http:
        for k in range(24):
            messages += [{"role": "user", "content": f"Turn {k}: " + "the cellar was cold and dark. " * 16}]
            before, body = _count(served, "chat_characters_tokenized"), {"messages": messages, "max_tokens": 1}
            made = http.post("/v1/chat/completions", json=body | {"return_token_ids": True}).json()
            text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
            assert made["prompt_token_ids"] == TEXT.encode(text, add_special_tokens=False)
            assert _count(served, "chat_characters_tokenized") - before < 2 * 2048 + 1000
            again = http.post("/v1/chat/completions", json=body | {"return_token_ids": True, "seed": 1}).json()
            assert again["prompt_token_ids"] == made["prompt_token_ids"]
            messages += [{"role": "assistant", "content": made["choices"][0]["message"]["content"] or "."}]
        assert _count(served, "chat_characters") > 4 * _count(served, "chat_characters_tokenized")
        assert _count(served, "chat_tokenizing_seconds") > 0
