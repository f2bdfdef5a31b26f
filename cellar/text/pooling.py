"""The way of pooling that a model asks for, as sentence-transformers writes it beside the weights."""

from __future__ import annotations

from pathlib import Path

from cellar.core.errors import CheckpointError
from cellar.text.tokenizer import read_json

FILE = Path("1_Pooling") / "config.json"
_PREFIX = "pooling_mode_"
_NAMES = {"lasttoken": "last", "mean_tokens": "mean", "cls_token": "cls", "max_tokens": "max"}
_DEFAULT = "last"
"""A causal model's last token is the only one that has seen all of the text."""


def read_pooling(checkpoint: Path | None) -> str:
    """How the model in this folder is meant to be pooled: last, mean, or the name of a way that nobody here can go.

    Raises CheckpointError if the file is damaged, or names several ways.
    """
    values = {} if checkpoint is None else read_json(checkpoint / FILE)
    named = values.get("pooling_mode")
    chosen = [named] if isinstance(named, str) else []
    chosen = chosen or [
        name.removeprefix(_PREFIX) for name, on in values.items() if name.startswith(_PREFIX) and on is True
    ]
    if len(chosen) > 1:
        raise CheckpointError(f"{FILE} of the model names {' and '.join(chosen)}; leave one of them.")
    return _NAMES.get(chosen[0], chosen[0]) if chosen else _DEFAULT
