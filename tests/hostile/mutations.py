"""JSON spoilt at random, from a seed: what people and programs send by mistake, and what nobody sends by mistake."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**30, 1e308, -0.0, 0.5, "", "x", "1", "\x00", "\ud800"),
    *(
        "\u202e",
        "é" * 300,
        "x" * 20_000,
        [],
        {},
        [None],
        [[]],
        {"": ""},
        [0] * 3000,
        ["a"] * 300,
        "{{ 7 * 7 }}",
        "$ref",
    ),
    *("../../etc/passwd", float("nan"), float("inf"), {"\ud800": 1}, {"a": {"a": {"a": {"a": {}}}}}),
)
NESTED = 3000


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to all that a value holds, the first of a list alone, and to itself."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list):
        for k in range(min(len(value), 1)):
            yield from places(value[k], (*path, k))


def spoilt(rng: random.Random, value: Any, others: tuple[Any, ...] = ()) -> Any:
    """The value with one to three things changed; `others` are known to be interesting where this comes from."""
    root = {"": deepcopy(value)}
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        path = rng.choice([("", *path) for path in places(root[""])])
        at: Any = root
        for part in path[:-1]:
            at = at[part]
        last = path[-1]
        match rng.randrange(8):
            case 0 if len(path) > 1 and isinstance(at, dict):
                del at[last]
            case 1 if len(path) > 1 and isinstance(at, dict):
                at[rng.choice(("", "\ud800", "x" * 300, "__class__", "type", last + "s"))] = at.pop(last)
            case 2 if isinstance(at[last], list):
                at[last] = at[last] * rng.choice((2, 100, 1000))
            case 3 if isinstance(at[last], dict):
                at[last][rng.choice(("x", "", "stream", "n", "$defs"))] = rng.choice(HOSTILE)
            case 4:
                at[last] = [at[last]]
            case 5 if isinstance(at[last], (int, float)) and not isinstance(at[last], bool):
                at[last] = rng.choice((-at[last], at[last] + 1, at[last] * 1000, str(at[last]), float(at[last])))
            case _:
                at[last] = deepcopy(rng.choice(HOSTILE + others))
    return root[""]


def spoilt_bytes(rng: random.Random, data: bytes) -> bytes:
    """The bytes with a few changed, missing, twice, or nested without end."""
    match rng.randrange(5):
        case 0:
            return data[: rng.randrange(len(data) + 1)]
        case 1:
            at = rng.randrange(len(data) + 1)
            return data[:at] + bytes(rng.randrange(256) for _ in range(rng.randrange(1, 9))) + data[at:]
        case 2:
            changed = bytearray(data)
            for _ in range(rng.randrange(1, 5)):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            return bytes(changed)
        case 3:
            return data.replace(b"{", b'{"a":' * NESTED, 1)
        case _:
            return data.replace(b'"', b'"model":1,"', 1)


def dumped(value: Any) -> bytes:
    """As JSON, with what it does not know (NaN) as Python writes it, which many clients do."""
    return json.dumps(value).encode()
