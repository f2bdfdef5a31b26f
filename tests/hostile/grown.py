"""Grammars grown until they hurt: each family is made larger until the server refuses it, and then larger still."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx

from tests.hostile.test_grammars import arrays, properties, references, rules, unions
from tests.limits import SECONDS


def ambiguous(count: int) -> str:
    """A text of many letters has very many derivations."""
    ways = [*("s " * (k % 4 + 2) for k in range(count % 9)), "T"]
    return f"start: s\ns: {' | '.join(ways)}\nT: /[a-z .]/\n"


FAMILIES: dict[str, Callable[[int], dict[str, Any]]] = {
    "references": lambda n: {"json": references(n)},
    "properties": lambda n: {"json": properties(n)},
    "arrays": lambda n: {"json": arrays(n)},
    "unions": lambda n: {"json": unions(n)},
    "rules": lambda n: {"grammar": rules(n)},
    "optional": lambda n: {"regex": "a?" * n},
    "classes": lambda n: {"regex": "[ab]?" * n},
    "groups": lambda n: {"regex": "(" * n + "a" + ")" * n},
    "counted": lambda n: {"regex": f"((a{{1,{n}}}b?){{1,{n}}}c?){{1,{n}}}"},
    "alternatives": lambda n: {"regex": "|".join(f"a{{{k}}}b" for k in range(1, n))},
    "choice": lambda n: {"choice": [f"c{k}" for k in range(n)]},
    "all of": lambda n: {"json": {"allOf": [{"type": "object", "required": [f"p{k}"]} for k in range(n)]}},
    "enum": lambda n: {"json": {"enum": [f"e{k}" for k in range(n)]}},
    "ambiguous": lambda n: {"grammar": ambiguous(n)},
}


def grow(url: str, seed: int, go_on: Callable[[int], bool], headers: dict[str, str]) -> Counter[int | str]:
    """Ask for ever larger grammars while `go_on(count)`; -> answers by status."""
    rng, found, count = random.Random(seed), Counter[int | str](), 0
    sizes = dict.fromkeys(FAMILIES, 8)
    with httpx.Client(base_url=url, timeout=SECONDS) as http:
        while go_on(count):
            count += 1
            name = rng.choice(sorted(FAMILIES))
            wanted = FAMILIES[name](sizes[name])
            body = {"prompt": "x", "max_tokens": 3, "structured_outputs": wanted}
            try:
                status = http.post("/v1/completions", json=body, headers=headers).status_code
            except httpx.TransportError:
                found["lost"] += 1
                time.sleep(0.1)
                continue
            found[status] += 1
            sizes[name] = min(4 * sizes[name], 60_000) if sizes[name] < 60_000 else 8
    return found
