"""Compiled grammars are kept, but not without end: a text of 16 KB may compile to 130 MB."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from cellar.core.memory import resident_bytes
from cellar.core.sampling import StructuredOutputsParams
from cellar.text.masker import Masker
from tests.limits import ROOT, SECONDS


class Compiler:
    """Makes matchers that are numbers, and has the process grow by what the regex says."""

    def __init__(self) -> None:
        self.num_bytes = 1000
        self.compiled: list[str] = []

    def compile(self, constraint: StructuredOutputsParams) -> Any:
        text = str(constraint.regex)
        self.compiled.append(text)
        self.num_bytes += int(text)
        return len(self.compiled)


def grammar(nbytes: int) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=str(nbytes))


def test_the_oldest_go_when_the_kept_ones_are_too_large() -> None:
    compiler = Compiler()
    masker = Masker(compiler, max_bytes=100, resident=lambda: compiler.num_bytes)  # type: ignore[arg-type]
    for nbytes in (30, 40, 20):
        masker.prepare(grammar(nbytes))
    masker.prepare(grammar(30))  # asked for again: the oldest no longer
    masker.prepare(grammar(25))
    assert [masker.ready(grammar(nbytes)) for nbytes in (30, 40, 20, 25)] == [True, False, True, True]
    masker.prepare(grammar(-50))  # memory came back meanwhile
    assert masker.ready(grammar(30))
    masker.prepare(grammar(200))
    assert masker.ready(grammar(200)), "the latest is kept whatever it takes: its request is about to start"
    assert not any(masker.ready(grammar(nbytes)) for nbytes in (30, 20, 25, -50))
    masker.prepare(grammar(10))
    assert [masker.ready(grammar(nbytes)) for nbytes in (200, 10)] == [False, True]
    assert compiler.compiled == ["30", "40", "20", "25", "-50", "200", "10"]


def test_and_when_they_are_too_many() -> None:
    compiler = Compiler()
    masker = Masker(compiler, max_grammars=2, resident=lambda: compiler.num_bytes)  # type: ignore[arg-type]
    for nbytes in (1, 2, 3):
        masker.prepare(grammar(nbytes))
    assert [masker.ready(grammar(nbytes)) for nbytes in (1, 2, 3)] == [False, True, True]


GREEDY = """
import sys
from cellar.core.sampling import StructuredOutputsParams
from cellar.server.heap import one_heap
from cellar.text.grammar import GrammarCompiler
from cellar.core.memory import resident_bytes
from cellar.text.masker import Masker
from tests.fake_front import TOKENIZER
from cellar.text.tokenizer import Tokenizer

one_heap()
tokenizer = Tokenizer.load(TOKENIZER)
masker = Masker(GrammarCompiler(tokenizer, tokenizer.vocab_size, (2,)))
masker.prepare(StructuredOutputsParams(regex="a"))
before = resident_bytes()
for letter in "abcdef":
    masker.prepare(StructuredOutputsParams(regex=f"{letter}?" * 8192))
print((resident_bytes() - before) >> 20, len(masker._grammars))
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how large a process is")
def test_memory_of_greedy_grammars_is_bounded() -> None:
    """Six of 130 MB each: more than three quarters of a gigabyte, if all were kept."""
    done = subprocess.run(
        [sys.executable, "-c", GREEDY], capture_output=True, text=True, timeout=SECONDS, cwd=ROOT, check=True
    )
    mebibytes, kept = map(int, done.stdout.split())
    assert mebibytes < 600
    assert kept < 6
    assert resident_bytes() > 2**20
