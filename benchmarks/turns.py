"""A conversation of many turns against a running server: prompt tokens computed and time spent tokenizing, per turn.

    cellar serve MODEL --port 8000 &
    python -m benchmarks.turns --url http://127.0.0.1:8000 --turns 40 --figure turns.png

The same conversation three times: responses that follow each other (stored ids), chat completions that send all
messages again, and the same with a cache salt of its own for each turn, so that nothing is reused. Tokens computed are
prompt tokens less those found in the cache; the time is what the server counts as `cellar:chat_tokenizing_seconds`. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import urllib.request
import uuid
from pathlib import Path
from typing import Any

WORDS = ("the", "cellar", "under", "old", "house", "was", "cold", "and", "dark", "wine", "in", "it", "older", "than")


class Client:
    """JSON in and out."""

    def __init__(self, url: str) -> None:
        self._url = url

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer. Raises HTTPError."""
        sent = urllib.request.Request(self._url + path, json.dumps(body).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(sent, timeout=600) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def tokenizing(self) -> float:
        """Seconds that the server has spent tokenizing chats so far."""
        with urllib.request.urlopen(self._url + "/metrics", timeout=60) as answer:
            text = answer.read().decode()
        found = re.search(r"^cellar:chat_tokenizing_seconds_total\{.*\} (\S+)$", text, re.MULTILINE)
        assert found is not None
        return float(found[1])


def asked(turns: int, words: int) -> list[str]:
    """What the user says."""
    draw = random.Random(0)
    return [" ".join(draw.choice(WORDS) for _ in range(words)) for _ in range(turns)]


def by_responses(client: Client, texts: list[str], answer: int) -> list[dict[str, float]]:
    """Each turn follows the one before by its id."""
    last, rows = None, list[dict[str, float]]()
    for text in texts:
        body = {"input": text, "previous_response_id": last, "max_output_tokens": answer, "temperature": 0}
        before = client.tokenizing()
        made = client.post("/v1/responses", body)
        last, usage = made["id"], made["usage"]
        rows.append(_row(usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], client, before))
    return rows


def by_chats(client: Client, texts: list[str], answer: int, reuse: bool) -> list[dict[str, float]]:
    """Each turn sends all messages again."""
    messages, rows = list[dict[str, str]](), list[dict[str, float]]()
    for text in texts:
        messages.append({"role": "user", "content": text})
        body: dict[str, Any] = {"messages": messages, "max_tokens": answer, "temperature": 0}
        if not reuse:
            body["cache_salt"] = uuid.uuid4().hex
        before = client.tokenizing()
        made = client.post("/v1/chat/completions", body)
        messages.append({"role": "assistant", "content": made["choices"][0]["message"]["content"] or ""})
        usage = made["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        rows.append(_row(usage["prompt_tokens"], cached, client, before))
    return rows


def _row(prompt: int, cached: int, client: Client, before: float) -> dict[str, float]:
    return {"prompt": prompt, "computed": prompt - cached, "seconds": client.tokenizing() - before}


def draw_figure(found: dict[str, list[dict[str, float]]], path: Path) -> None:
    """Tokens and time over the turns."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (tokens, seconds) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name, rows in found.items():
        turns = range(1, len(rows) + 1)
        tokens.plot(turns, [row["computed"] for row in rows], label=name, marker=".")
        seconds.plot(turns, [1e3 * row["seconds"] for row in rows], label=name, marker=".")
    first = next(iter(found.values()))
    tokens.plot(range(1, len(first) + 1), [row["prompt"] for row in first], ":", color="gray", label="context")
    tokens.set(xlabel="turn", ylabel="prompt tokens computed", yscale="log")
    seconds.set(xlabel="turn", ylabel="ms from rendered text to ids", ylim=(0, None))
    tokens.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--words", type=int, default=60, help="words of each user message")
    parser.add_argument("--answer", type=int, default=40, help="most tokens of each answer")
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    client, texts = Client(options.url), asked(options.turns, options.words)
    found = {
        "responses, stored ids": by_responses(client, texts, options.answer),
        "chat, reuse by content": by_chats(client, texts, options.answer, True),
        "chat, no reuse": by_chats(client, texts, options.answer, False),
    }
    for name, rows in found.items():
        first, last = rows[1], rows[-1]
        print(
            f"{name:24} turn 2: {first['computed']:.0f} of {first['prompt']:.0f} prompt tokens computed, "
            f"{1e3 * first['seconds']:.2f} ms   turn {len(rows)}: {last['computed']:.0f} of {last['prompt']:.0f}, "
            f"{1e3 * last['seconds']:.2f} ms"
        )
    if options.figure is not None:
        draw_figure(found, options.figure)
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
