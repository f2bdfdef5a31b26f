"""How much a tokenizer's own steps make of a text: a few lines of tokenizer.json can make a gigabyte of one letter, and
a text is normalized already when the file is read (its added tokens are).

Bounded are bytes, from the JSON alone, before anything runs: a Replace makes its content of each match, a byte-level
step two bytes of one, a template puts its tokens around every text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST_GROWTH = 64.0
"""Bytes that the steps of one stage may make of one: Llama's make three, two byte-level steps four."""

MOST_ADDED = 1024
"""Bytes that a stage may put before a text, and tokens that a template may put around one."""

_INNER = ("normalizers", "pretokenizers", "decoders", "processors")


def excess(tokenizer: Mapping[str, Any]) -> str | None:
    """What of a tokenizer.json makes too much of a text, for the end of a sentence; None if nothing does.

    Parts of another shape than the format's are passed over: who reads them next says so.
    """
    for stage in ("normalizer", "pre_tokenizer", "decoder"):
        growth, added = _growth(tokenizer.get(stage))
        if growth > MOST_GROWTH or added > MOST_ADDED:
            return f"its {stage} makes up to {growth:.3g} bytes of one, and adds {added:.3g} to every text"
    tokens = _around(tokenizer.get("post_processor"))
    return f"its post_processor puts {tokens} tokens around every text" if tokens > MOST_ADDED else None


def _growth(step: Any) -> tuple[float, float]:
    """Bytes made of one byte, and bytes added whatever the text; a Replace of nothing has no bound."""
    if not isinstance(step, dict):
        return 1.0, 0.0
    growth, added = 1.0, 0.0
    for inner in _parts(step):
        more, further = _growth(inner)
        growth, added = growth * more, added * more + further
    match step:
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
            growth *= max(1.0, len(_bytes(content)) / len(_bytes(pattern))) if pattern else float("inf")
        case {"type": "Replace", "content": str(content)}:
            growth *= max(1.0, len(_bytes(content)))
        case {"type": "Prepend", "prepend": str(content)}:
            added += len(_bytes(content))
        case {"type": "ByteLevel"}:
            growth *= 2.0
    return growth, added


def _around(step: Any) -> int:
    """Tokens that a post-processor puts around one text."""
    if not isinstance(step, dict):
        return 0
    match step:
        case {"type": "TemplateProcessing", "single": list(pieces), "special_tokens": dict(tokens)}:
            ids = {name: len(token.get("ids") or ()) for name, token in tokens.items() if isinstance(token, dict)}
            named = [piece["SpecialToken"] for piece in pieces if isinstance(piece, dict) and "SpecialToken" in piece]
            return sum(ids.get(str(one.get("id")), 0) for one in named if isinstance(one, dict))
    return sum(map(_around, _parts(step)))


def _parts(step: dict[str, Any]) -> list[Any]:
    return [inner for name in _INNER if isinstance(step.get(name), list) for inner in step[name]]


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
