"""Text as it comes, broken between words where a line of the terminal ends."""

from __future__ import annotations

from collections.abc import Callable


class WordWrap:
    """Passes text on to `write`; the word at hand is held back until it is clear on which line it goes.

    `width` columns; None: nothing is broken, nor held back. A word longer than a line is left to the terminal.
    """

    def __init__(self, write: Callable[[str], object], width: int | None) -> None:
        self._write = write
        self._width = width
        self._column = 0
        self._blanks = ""
        self._word = ""

    def push(self, text: str) -> None:
        """More text."""
        if self._width is None:
            self._write(text)
            return
        for c in text:
            if c not in " \n":
                self._word += c
                continue
            self._end_word()
            if c == "\n":
                self._write("\n")
                self._column, self._blanks = 0, ""
            else:
                self._blanks += c

    def flush(self) -> None:
        """No more comes, for now: what is held back is written."""
        if self._width is not None:
            self._end_word()
            self._write(self._blanks)
            self._blanks = ""

    def _end_word(self) -> None:
        if not self._word:
            return
        from rich.cells import cell_len

        width = cell_len(self._word)
        assert self._width is not None
        if self._column and self._column + len(self._blanks) + width > self._width:
            self._write("\n" + self._word)
            self._column = width
        else:
            self._write(self._blanks + self._word)
            self._column += len(self._blanks) + width
        self._blanks = self._word = ""
