"""The whole answer is {"name": ..., "parameters": {...}}, several with ; between."""

from __future__ import annotations

from cellar.text.tools.call import BLANK, CallReader, Parsed

PYTHON_TAG = "<|python_tag|>"


class LlamaParser:
    """The answer begins with calls, or has none (Llama 3.1 to 3.3)."""

    def __init__(self) -> None:
        self._held = ""
        self._count = 0
        self._plain = False
        self._reader: CallReader | None = None

    def push(self, text: str) -> Parsed:
        found, rest = Parsed(), text
        while rest:
            if self._plain:
                found.content += rest
                break
            rest = self._begin(rest, found) if self._reader is None else self._inside(self._reader, rest, found)
        return found

    def flush(self) -> Parsed:
        reader, held = self._reader, self._held
        if reader is not None:
            return Parsed() if reader.told else Parsed(held + reader.text)
        return Parsed() if self._count else Parsed(held)

    def _begin(self, rest: str, found: Parsed) -> str:
        """Before a call: blanks, the tag before the first one, semicolons before the others."""
        for k, character in enumerate(rest):
            begun = self._held + rest[:k]
            if character == "{" and (self._count or begun.strip() in ("", PYTHON_TAG)):
                self._held = begun
                self._reader = CallReader(self._count, ("parameters", "arguments"))
                return rest[k:]
            tag = (begun + character).strip()
            if not (character in BLANK + ";" if self._count else PYTHON_TAG.startswith(tag)):
                return self._give_up(begun, rest[k:], found)
        self._held += rest
        return ""

    def _inside(self, reader: CallReader, rest: str, found: Parsed) -> str:
        used = reader.push(rest)
        if (piece := reader.piece()) is not None:
            self._count += piece.name is not None
            found.calls.append(piece)
        rest = rest[used:]
        if reader.failed and not reader.told:
            return self._give_up(self._held + reader.text, rest, found)
        if reader.ended:
            self._reader, self._held = None, ""
        elif reader.failed:
            return self._give_up("", rest, found)
        return rest

    def _give_up(self, before: str, rest: str, found: Parsed) -> str:
        """The rest is text."""
        self._plain, self._held, self._reader = True, "", None
        return before + rest
