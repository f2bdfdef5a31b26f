"""What the server says that it found of the prompts: a section of the report."""

from __future__ import annotations

from collections.abc import Sequence

from cellar.bench.serve.client import Answer
from cellar.reports.load import Section


def cache_section(answers: Sequence[Answer]) -> tuple[Section, ...]:
    """Cached prompt tokens, by the server's account (`usage.prompt_tokens_details`); nothing if it gives none."""
    told = [(a.cached_tokens, int((a.usage or {}).get("prompt_tokens", 0))) for a in answers]
    counted = [(cached, prompt) for cached, prompt in told if cached is not None]
    if not counted:
        return ()
    cached, prompt = (sum(column) for column in zip(*counted, strict=True))
    rows = (
        ("Cached prompt tokens", "cached_prompt_tokens", float(cached)),
        ("Share of prompt tokens (%)", "cached_prompt_share", 100.0 * cached / max(prompt, 1)),
    )
    return (Section("Prompt cache", rows),)
