"""Corpus to tokens: cleaning, the held-out split, the tokenizer and the packed token arrays.

Everything here is deterministic: the same corpus files give the same tokenizer and the same arrays.
A "book" is one entry of a corpus file (they are separated by ``<|endoftext|>``); a "section" is the run of
paragraphs between two headings, which is what the model sees as one document.
"""

from __future__ import annotations

import json
import lzma
import re
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

END_OF_TEXT = "<|endoftext|>"
END_ID = 0
CHILDREN_FILE = "children_and_fairy_tales.txt.xz"
BOOKS_FILE = "simple_books.txt.xz"

HELD_OUT_STRETCHES = 16
HELD_OUT_SHARE = 0.02
LEAK_WORDS = 13

_MOJIBAKE = re.compile("[Ã¨ª©¦\x80-\x9f\ufffd{}|<>\\\\=^`]|[\u0370-\u03ff]")
_SLUR = re.compile(r"\bn[i]gg|\bpick[ao]ninn|\bdark(?:y|ie|ies)\b", re.IGNORECASE)
_ADULT = re.compile(r"\b(?:fuck|cunt|penis|breasts|naked|womb|sexual|phallic|orgasm)", re.IGNORECASE)
_CREDIT = re.compile(r"^(?:translat|edited|illustrat|published|copyright|by )", re.IGNORECASE)
_PLAIN = str.maketrans(
    {
        "\u201c": '"', "\u201d": '"', "\u201e": '"', "\u2018": "'", "\u2019": "'",
        "\u2014": "--", "\u2013": "-", "\u2026": "...",
        "\u00a0": " ", "\u2009": " ", "\u200a": " ", "\ufeff": "", "\u200b": "", "\u2060": "",
        "_": "", "*": "",
    }
)  # fmt: skip


def read_books(path: Path) -> list[str]:
    """The books of one corpus file, in file order."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return [book for book in file.read().split(END_OF_TEXT) if book.strip()]


def unsuitable(book: str) -> bool:
    """Whether a whole book is left out: plays, adult themes, or racial slurs on many pages."""
    if book.count("**") + book.count("[_") > 100:
        return True
    return len(_ADULT.findall(book)) > 15 or len(_SLUR.findall(book)) > 20


def is_verse(lines: list[str]) -> bool:
    """Whether a paragraph's lines are verse (short, nearly all starting with a capital), to keep apart."""
    starts = sum(1 for line in lines if re.match(r"[\"'(]*[A-Z]", line))
    return len(lines) > 1 and max(map(len, lines)) < 60 and starts >= 0.8 * len(lines)


def clean_paragraph(raw: str) -> str:
    """One paragraph in plain text, or "" if it is not prose worth learning from."""
    if _MOJIBAKE.search(raw) or _SLUR.search(raw):
        return ""
    text = unicodedata.normalize("NFC", raw.translate(_PLAIN))
    text = re.sub(r"\[[^\]]*\]", "", text)
    lines = [re.sub(r"\s+", " ", line).strip() for line in text.split("\n")]
    lines = [line for line in lines if line]
    text = "\n".join(lines) if is_verse(lines) else " ".join(lines)
    text = re.sub(r"\. ?\.(?: ?\.)+", "...", text)
    text = re.sub(r" ?-{2,} ?", "--", text)
    text = re.sub(r"\s+([,;:!?])", r"\1", text)
    short = len(text) < 80
    if not re.search("[a-z]", text) or (short and _CREDIT.match(text)) or (short and text.startswith("--")):
        return ""
    return text


def sections(book: str) -> list[list[str]]:
    """A book as sections of cleaned paragraphs; headings end a section and are dropped."""
    result: list[list[str]] = [[]]
    for raw in re.split(r"\n\s*\n", book):
        if raw.lstrip().startswith("#"):
            raw = raw.strip().partition("\n")[2]
            result.append([])
        paragraph = clean_paragraph(raw)
        if paragraph:
            result[-1].append(paragraph)
    return [section for section in result if sum(map(len, section)) > 300]


def hold_out(books: list[list[list[str]]]) -> tuple[list[list[list[str]]], list[list[str]]]:
    """Split books (sections of paragraphs) into what is trained on and the held-out stretches.

    The stretches are equal in bytes, taken from books spread evenly over the file, each from the middle of
    its book; together they are ``HELD_OUT_SHARE`` of the bytes.
    """
    total = sum(len(paragraph.encode()) for book in books for section in book for paragraph in section)
    want = total * HELD_OUT_SHARE / HELD_OUT_STRETCHES
    lengths = [sum(len(p) for section in book for p in section) for book in books]
    long_enough = [i for i, length in enumerate(lengths) if length > 6 * want]
    chosen = {long_enough[i * len(long_enough) // HELD_OUT_STRETCHES] for i in range(HELD_OUT_STRETCHES)}
    train: list[list[list[str]]] = []
    held: list[list[str]] = []
    for index, book in enumerate(books):
        if index not in chosen:
            train.append(book)
            continue
        size = sum(len(p.encode()) for section in book for p in section)
        position, taken, stretch, kept = 0, 0, [], []
        for section in book:
            before: list[str] = []
            after: list[str] = []
            for paragraph in section:
                if position >= size * 0.4 and taken < want:
                    stretch.append(paragraph)
                    taken += len(paragraph.encode())
                else:
                    (after if taken else before).append(paragraph)
                position += len(paragraph.encode())
            kept += [part for part in (before, after) if part]
        train.append(kept)
        held.append(stretch)
    return train, held


def word_grams(paragraph: str) -> Iterator[tuple[str, ...]]:
    """All runs of ``LEAK_WORDS`` words of a paragraph, lower case, punctuation ignored."""
    words = re.findall(r"[a-z']+", paragraph.lower())
    for i in range(len(words) - LEAK_WORDS + 1):
        yield tuple(words[i : i + LEAK_WORDS])


def without_leaks(books: list[list[list[str]]], held: list[list[str]]) -> tuple[list[list[list[str]]], int]:
    """Training books less every paragraph that shares a run of words with the held-out text, and how many."""
    known = {gram for stretch in held for paragraph in stretch for gram in word_grams(paragraph)}
    dropped = 0
    result: list[list[list[str]]] = []
    for book in books:
        kept_book: list[list[str]] = []
        for section in book:
            kept = [p for p in section if not any(gram in known for gram in word_grams(p))]
            dropped += len(section) - len(kept)
            if kept:
                kept_book.append(kept)
        result.append(kept_book)
    return result, dropped


def new_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer trained on ``texts``; encoding puts ``<|endoftext|>`` in front."""
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r"'(?:s|t|re|ve|m|ll|d)\b| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", pair=f"{END_OF_TEXT} $A $B", special_tokens=[(END_OF_TEXT, END_ID)]
    )
    return tokenizer


def pack(tokenizer: Tokenizer, documents: list[str]) -> np.ndarray:
    """All documents as one uint16 array, each led by the end-of-text id."""
    encoded = tokenizer.encode_batch(documents)
    return np.concatenate([np.asarray(item.ids, dtype=np.uint16) for item in encoded])


def prepare(corpus: Path, work: Path, vocab_size: int, limit_books: int | None = None) -> dict[str, object]:
    """Write tokenizer.json, the uint16 token arrays and facts.json to ``work``; returns the facts."""
    work.mkdir(parents=True, exist_ok=True)
    raw = {name: read_books(corpus / name)[:limit_books] for name in (CHILDREN_FILE, BOOKS_FILE)}
    suitable = {name: [book for book in books if not unsuitable(book)] for name, books in raw.items()}
    split = {name: [sections(book) for book in books] for name, books in suitable.items()}
    children, held = hold_out(split[CHILDREN_FILE])
    children, leaks_children = without_leaks(children, held)
    books, leaks_books = without_leaks(split[BOOKS_FILE], held)
    child_docs = ["\n\n".join(section) for book in children for section in book]
    book_docs = ["\n\n".join(section) for book in books for section in book]
    held_docs = ["\n\n".join(stretch) for stretch in held]

    tokenizer = new_tokenizer(child_docs + book_docs[::3], vocab_size)
    tokenizer.save(str(work / "tokenizer.json"))
    sizes: dict[str, dict[str, int]] = {}
    for name, documents in (("children", child_docs), ("books", book_docs), ("heldout", held_docs)):
        ids = pack(tokenizer, documents)
        np.save(work / f"{name}.npy", ids)
        sizes[name] = {
            "documents": len(documents),
            "bytes": sum(len(document.encode()) for document in documents),
            "tokens": int(ids.size),
        }
    facts: dict[str, object] = {
        "sizes": sizes,
        "books": {name: {"all": len(raw[name]), "kept": len(suitable[name])} for name in raw},
        "leaking_paragraphs_dropped": leaks_children + leaks_books,
    }
    (work / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")
    return facts
