"""Words as they come, on lines of a terminal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cellar.cli.wrap import WordWrap


def wrapped(pieces: list[str], width: int | None) -> str:
    out: list[str] = []
    wrap = WordWrap(out.append, width)
    for piece in pieces:
        wrap.push(piece)
    wrap.flush()
    return "".join(out)


def test_lines_break_between_words() -> None:
    assert wrapped(["the quick br", "own fox"], 10) == "the quick\nbrown fox"
    assert wrapped(["one\n\ntwo three"], 5) == "one\n\ntwo\nthree"
    assert wrapped(["a verylongword b"], 6) == "a\nverylongword\nb"
    assert wrapped(["\u732b\u732b \u732b\u732b"], 8) == "\u732b\u732b\n\u732b\u732b"  # two columns each


def test_without_a_width_nothing_is_held_back() -> None:
    out: list[str] = []
    WordWrap(out.append, None).push("half a wor")
    assert out == ["half a wor"]


@given(text=st.text("ab \n", max_size=80), cuts=st.lists(st.integers(0, 80), max_size=5), width=st.integers(3, 12))
def test_nothing_is_lost_and_no_line_is_too_long(text: str, cuts: list[int], width: int) -> None:
    places = sorted(min(cut, len(text)) for cut in cuts)
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    found = wrapped(pieces, width)
    assert found == wrapped([text], width)
    assert found.split() == text.split()
    for line in found.split("\n"):
        assert len(line.rstrip()) <= width or " " not in line.strip()
