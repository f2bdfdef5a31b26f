"""The whole answer is a list of Python calls, [name(key="value"), ...] (Llama 4, Llama 3.2)."""

from __future__ import annotations

import ast
import json
import math
import warnings
from typing import Any

from cellar.text.tools.call import BLANK, CallPiece, Parsed

START, END = "<|python_start|>", "<|python_end|>"

_WORDS = {"true": True, "false": False, "null": None}


class PythonicParser:
    """The answer begins with calls, or has none. A call is told when it is whole: Python is not JSON before that."""

    def __init__(self) -> None:
        self._held = ""  # all that was not told
        self._item = ""  # of it, the call at hand
        self._open: list[str] = []  # brackets inside of the call
        self._quote = ""
        self._escaped = False
        self._began = self._plain = self._done = False
        self._count = 0

    def push(self, text: str) -> Parsed:
        found = Parsed()
        for position, c in enumerate(text):
            if self._plain:
                found.content += text[position:]
                break
            self._held += c
            if self._done:
                self._behind(found)
            elif self._began:
                self._inside(c, found)
            else:
                self._begin(found)
        return found

    def flush(self) -> Parsed:
        held, self._held = self._held, ""
        return Parsed() if self._done and not held.strip() else Parsed(held)

    def _begin(self, found: Parsed) -> None:
        begun = self._held.strip(BLANK)
        if begun.startswith(START):
            begun = begun[len(START) :].strip(BLANK)
        if begun == "[":
            self._began = True
        elif begun and not START.startswith(begun):
            self._give_up(found)

    def _inside(self, c: str, found: Parsed) -> None:
        if self._quote:
            if self._escaped:
                self._escaped = False
            elif c == "\\":
                self._escaped = True
            elif c == self._quote:
                self._quote = ""
        elif c in "\"'":
            self._quote = c
        elif c in "([{":
            self._open.append(c)
        elif c in ")]}" and self._open:
            self._open.pop()
        elif c in ",]" and not self._open:
            self._end_of(c, found)
            return
        self._item += c

    def _end_of(self, c: str, found: Parsed) -> None:
        call = _call(self._item.strip())
        if call is None and not (c == "]" and self._count and not self._item.strip()):  # a comma may be the last
            self._give_up(found)
            return
        if call is not None:
            found.calls.append(CallPiece(self._count, *call))
            self._count += 1
        self._held = self._item = ""
        self._done = c == "]"

    def _behind(self, found: Parsed) -> None:
        behind = self._held.strip(BLANK)
        if behind == END:
            self._held = ""
        elif behind and not END.startswith(behind):
            self._give_up(found)

    def _give_up(self, found: Parsed) -> None:
        found.content += self._held
        self._plain, self._held = True, ""


def _call(text: str) -> tuple[str, str] | None:
    """name(key=literal, ...) -> the name, and its arguments as JSON; None if it is something else."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a backslash in a string is the model's business
            node = ast.parse(text, mode="eval").body
        if not isinstance(node, ast.Call) or node.args:
            return None
        name = ast.unparse(node.func)
        if not all(part.isidentifier() for part in name.split(".")):
            return None
        arguments = {word.arg: _value(word.value) for word in node.keywords}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return None if None in arguments else (name, json.dumps(arguments, ensure_ascii=False))


def _value(node: ast.expr) -> Any:
    """A literal, in Python's words or JSON's. Raises ValueError for anything else."""
    match node:
        case ast.Constant(value=value) if value is None or isinstance(value, (str, int, float)):
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError("a number beyond JSON")
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value)) if isinstance(value, (int, float)):
            return -_value(node.operand)
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_value(element) for element in elements]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            pairs = zip(keys, values, strict=True)
            return {str(_value(key)): _value(value) for key, value in pairs if key is not None}
    raise ValueError("no literal")
