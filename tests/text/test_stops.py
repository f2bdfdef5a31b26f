from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cellar.text.stops import StopMatcher

words = st.text("ab", min_size=1, max_size=4)


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Look at every prefix of the text: the first that ends in a stop string, and the longest such stop string."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def held(text: str, stops: list[str]) -> int:
    """Characters at the end of a text that begin a stop string and do not end it."""
    starts = [stop[:k] for stop in stops for k in range(1, len(stop))]
    return max((len(start) for start in starts if text.endswith(start)), default=0)


@settings(max_examples=500, deadline=None)
@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=8), stops=st.lists(words, max_size=4), include=st.booleans()
)
@example(pieces=["a", "a", "b"], stops=["aab"], include=False)
@example(pieces=["aaab"], stops=["aab", "b"], include=False)
@example(pieces=["baa"], stops=["ab", "ba", "aba"], include=False)
@example(pieces=["abab", "c"], stops=["ababc", "b"], include=True)
def test_any_split_gives_what_a_naive_search_gives(pieces: list[str], stops: list[str], include: bool) -> None:
    text = "".join(pieces)
    matcher = StopMatcher(stops, include)
    shown, stopped = "", None
    for n, piece in enumerate(pieces):
        emitted, stopped = matcher.push(piece)
        shown += emitted
        seen = "".join(pieces[: n + 1])
        if stopped is not None:
            assert naive(seen, stops, include)[1] == stopped, "found in the very piece that completes it"
            assert naive("".join(pieces[:n]), stops, include)[1] is None
            break
        assert shown == seen[: len(seen) - held(seen, stops)], "holds back what may become a stop string, and no more"
    else:
        shown += matcher.flush()
    assert (shown, stopped) == naive(text, stops, include)


@settings(max_examples=300, deadline=None)
@given(
    early=st.lists(st.text("abc", max_size=3), max_size=4),
    late=st.lists(st.text("abc", max_size=3), max_size=4),
    stops=st.lists(words, min_size=1, max_size=4),
)
def test_unarmed_text_completes_nothing_but_may_begin_one(early: list[str], late: list[str], stops: list[str]) -> None:
    before, text = "".join(early), "".join(early) + "".join(late)
    want: tuple[str, str | None] = (text, None)
    for end in range(len(before) + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            want = (text[: end - len(stop)], stop)
            break
    matcher = StopMatcher(stops)
    shown = ""
    for n, piece in enumerate(early, 1):
        emitted, stopped = matcher.push(piece, armed=False)
        assert stopped is None
        shown += emitted
        seen = "".join(early[:n])
        assert shown == seen[: len(seen) - held(seen, stops)]
    stopped = None
    for piece in late:
        emitted, stopped = matcher.push(piece)
        shown += emitted
        if stopped is not None:
            break
    else:
        shown += matcher.flush()
    assert (shown, stopped) == want


@pytest.mark.parametrize(("include", "shown"), [(False, "one, "), (True, "one, two")])
def test_the_stop_string_is_shown_on_request(include: bool, shown: str) -> None:
    matcher = StopMatcher(["two"], include)
    parts = [matcher.push(text) for text in ("one, t", "w", "o, three")]
    assert "".join(part.text for part in parts) == shown
    assert [part.stop for part in parts] == [None, None, "two"]


def test_a_fork_looks_ahead_without_moving() -> None:
    matcher = StopMatcher(["\n\n"])
    assert matcher.push("a\n").text == "a"
    assert matcher.fork().push("\n").stop == "\n\n"
    assert matcher.push("b") == ("\nb", None)


def test_many_long_stop_strings_cost_one_pass() -> None:
    """Each character is looked at a bounded number of times, also where naive matchers back up."""
    matcher = StopMatcher(["a" * n + "b" for n in range(1, 200)])
    text = "".join(matcher.push("a").text for _ in range(2000))
    assert len(text) == 2000 - 199
    assert matcher.push("b").stop == "a" * 199 + "b"
