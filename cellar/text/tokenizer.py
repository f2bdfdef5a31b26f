"""Tokenizer of a checkpoint in Hugging Face's layout: text to ids and back, special tokens, end symbols."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from cellar.core.errors import CheckpointError, RequestError
from cellar.text.cuts import MAX_LENGTH, cuts, safe_tokens
from cellar.text.decoding import DecoderKind, Decoding
from cellar.text.growth import excess
from cellar.text.reach import reach

IntArray = npt.NDArray[np.int32]

PART = 2**16
"""Characters that are tokenized in one go, where a text can be cut: the backend takes up to 220 bytes for each."""

MOST = 2**20
"""Characters that can be tokenized in one go, where there is no cut."""

_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Wraps a `tokenizers.Tokenizer` with what a checkpoint's other files say about its special tokens.

    `special_tokens` maps a role (`bos_token`) to its string; `eos_token_ids` are all ids that end an answer.
    `cuts` matches where a text may be divided (see `cuts.py`).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        known = [AddedToken(s, special=True, normalized=False) for s in self.special_tokens.values()]
        # A role's token that the vocabulary lacks would get an id that the model has no row for.
        backend.add_special_tokens([token for token in known if backend.token_to_id(token.content) is not None])
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.bos_token_id = self._role_id("bos_token")
        self.pad_token_id = self._role_id("pad_token")
        eos = self._role_id("eos_token")
        self.eos_token_ids = tuple(dict.fromkeys([*([] if eos is None else [eos]), *eos_token_ids]))
        self._texts: dict[int, str] = {}
        # A long text's part is tokenized by one thread at a time: the backend allocates all the while, and whoever has
        # the interpreter would wait for the process's heap behind each of them. One goes at a million characters a
        # second and more; what has no cut may take hundreds of megabytes.
        self._large = threading.Lock()
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        decoder = None if backend.decoder is None else backend.decoder.__getstate__().decode()
        self.decoding = Decoding(decoder, backend.id_to_token, self.special_ids)
        self._reach = reach(backend)
        self.cuts = cuts(backend)
        self._anchor = next(iter(safe_tokens(backend)), None)

    @classmethod
    def load(cls, directory: str | Path) -> Tokenizer:
        """Read tokenizer.json, or vocab.json with merges.txt as GPT-2 and OPT have it, and the files beside it.

        Raises CheckpointError if they are missing or damaged.
        """
        path = Path(directory)

        def unfit(reason: str) -> CheckpointError:
            return CheckpointError(f"the tokenizer in {str(path)!r} cannot be used ({reason}); fetch its files again.")

        with _panics_told(unfit):
            tokenizer = cls._load(path)
            with suppress(Exception):  # a vocabulary may lack these letters
                tokenizer._backend.decode(tokenizer._backend.encode_batch_fast(["A a.", ""])[0].ids)
            return tokenizer

    @classmethod
    def _load(cls, path: Path) -> Tokenizer:
        if not path.is_dir():
            raise CheckpointError(f"there is no tokenizer directory {str(path)!r}; give one that holds tokenizer.json.")
        config = read_json(path / "tokenizer_config.json")
        model_config = read_json(path / "config.json")
        named = _named_tokens({**read_json(path / "special_tokens_map.json"), **config})
        if (path / "tokenizer.json").exists():
            backend = _from_json(path / "tokenizer.json")
        elif (path / "vocab.json").exists() and (path / "merges.txt").exists():
            opt = model_config.get("model_type") == "opt"
            end = "</s>" if opt else "<|endoftext|>"
            named = {"bos_token": end, "eos_token": end, "unk_token": end, **named}
            backend = _from_vocab(path, config, named, add_bos_token=bool(config.get("add_bos_token", opt)))
        else:
            raise CheckpointError(
                f"{str(path)!r} has no tokenizer.json, nor vocab.json with merges.txt; add one of them"
                " (transformers makes tokenizer.json from a tokenizer.model)."
            )
        _add_listed(backend, config.get("added_tokens_decoder", {}), path)
        eos = token_ids(read_json(path / "generation_config.json").get("eos_token_id"))
        if not eos and "eos_token" not in named:
            eos = token_ids(model_config.get("eos_token_id"))
        return cls(backend, named, eos)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; with `add_special_tokens` as the model expects a prompt to begin (and end).

        Raises RequestError if the tokenizer fails on it, or if more than MOST characters of it cannot be divided.
        """
        # As a batch of one: `encode` would keep the interpreter from all other threads until it is done.
        if len(text) <= PART:
            return self._encoded([text], add_special_tokens)[0]
        ids: list[int] = self.encode_array(text, add_special_tokens).tolist()
        return ids

    def encode_array(self, text: str, add_special_tokens: bool = True, gone: threading.Event | None = None) -> IntArray:
        """`encode` as int32 [n]. A long text is tokenized part by part, where it may be cut; once it is `gone`, which
        another thread may say, no other part is, and RequestError is raised.
        """
        if len(text) <= PART:
            return np.array(self.encode(text, add_special_tokens), np.int32)
        parts = self._parts(text)
        before: list[int] = []
        after: list[int] = []
        if add_special_tokens:
            begin = next(parts)
            (around, first), (inside,) = self._encoded(["", begin], True), self._encoded([begin], False)
            parts = chain([begin], parts)
            extra = len(first) - len(inside)
            where = next((k for k in range(extra + 1) if first[k : k + len(inside)] == inside), None)
            if where is None or len(around) != extra:  # what stands around depends on the text
                return np.array(self._encoded([text], True)[0], np.int32)
            before, after = first[:where], first[where + len(inside) :]
        return np.concatenate([np.array(ids, np.int32) for ids in (before, *self.encode_all(parts, gone), after)])

    def _parts(self, text: str) -> Iterator[str]:
        """A text cut into parts of at least PART characters, as long as there are cuts. More than MOST without one
        cannot be tokenized, so nobody looks further.
        """
        begin = 0
        while (cut := self._cut(text, begin + PART, begin + MOST)) is not None:
            yield text[begin:cut]
            begin = cut
        yield text[begin:]

    def _cut(self, text: str, first: int, last: int) -> int | None:
        """The first place in [first, last] where a text may be cut. Others have the interpreter every few
        milliseconds: a search in one go would keep it, for half a second in 8 MB of digits.
        """
        last = min(last, len(text) - 1)
        while self.cuts is not None and first <= last:
            end = min(first + PART, last + 1)
            match = self.cuts.search(text, first, end + MAX_LENGTH)
            if match is not None and match.start() < end:
                return match.start()
            first = end
        return None

    def encode_all(self, texts: Iterable[str], gone: threading.Event | None = None) -> list[IntArray]:
        """Ids of texts, int32, without special tokens around them; not all at once. Raises as `encode_array` does."""
        found, some, size = list[IntArray](), list[str](), 0
        for text in texts:
            if gone is not None and gone.is_set():
                raise RequestError("nobody waits for the text any more.")
            some.append(text)
            size += len(text)
            if size >= PART:
                found += (np.array(ids, np.int32) for ids in self._encoded(some, False))
                some, size = [], 0
        found += (np.array(ids, np.int32) for ids in self._encoded(some, False))
        return found

    def encode_inside(self, text: str) -> list[int]:
        """Ids of a text that follows another: what a tokenizer does at the beginning of a text is not done."""
        if self._anchor is None or not text:
            return self.encode(text, add_special_tokens=False)
        return self.encode(self._anchor + text, add_special_tokens=False)[1:]

    def least_tokens(self, text: str) -> int:
        """So many tokens a text has for certain, perhaps many more; found out by its length alone."""
        return 0 if self._reach is None else math.ceil(len(text) / self._reach)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; ids outside the vocabulary have none. What the tokenizer fails on is U+FFFD."""
        try:
            with _panics_told(ValueError):
                text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except ValueError:
            return "\ufffd"
        return text

    def id_to_piece(self, token: int) -> str | None:
        """The vocabulary's own string of an id (`Ġthe`, `▁the`, `<0x0A>`); None if it has none."""
        piece: str | None = self._backend.id_to_token(token)
        return piece

    def piece_to_id(self, piece: str) -> int | None:
        """The id of a vocabulary string, special tokens included; None if it has none."""
        token: int | None = self._backend.token_to_id(piece)
        return token

    def id_to_bytes(self, token: int) -> bytes:
        """UTF-8 of what one token contributes inside a text, its leading space included; may be part of a character."""
        piece = self.decoding.pieces[token]
        if piece is None:
            return b""
        if self.decoding.kind is DecoderKind.WINDOW:
            return self._text_after_itself(token).encode()
        if isinstance(piece, int):
            return bytes((piece,))
        return piece.encode() if isinstance(piece, str) else piece

    def id_to_text(self, token: int) -> str:
        """`id_to_bytes` as text; U+FFFD stands for what is no whole character."""
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self.id_to_bytes(token).decode(errors="replace")
        return text

    def _encoded(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        longest = max(map(len, texts), default=0)
        if longest > MOST:
            raise RequestError(
                f"a stretch of more than {MOST} characters of the text has no place where it can be divided, which is "
                "more than is tokenized in one go; send it in several texts, or as token ids.",
                "prompt",
            )
        try:
            with self._large if sum(map(len, texts)) >= PART else nullcontext(), _panics_told(ValueError):
                found = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except Exception as error:  # tokenizers raises bare Exception
            raise RequestError(
                f"the model's tokenizer cannot read this text ({error}); change the text.", "prompt"
            ) from error
        return [encoding.ids for encoding in found]

    def _text_after_itself(self, token: int) -> str:
        # As the first token of a text it might lose its space, so it is decoded as the second.
        once = self.decode([token], skip_special_tokens=False)
        return self.decode([token, token], skip_special_tokens=False)[len(once) :]

    def _role_id(self, role: str) -> int | None:
        content = self.special_tokens.get(role)
        return None if content is None else self.piece_to_id(content)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, {} if there is no such file. Raises CheckpointError if it is damaged."""
    if not path.exists():
        return {}
    return _object(_text(path), path)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{str(path)!r} is not readable JSON ({error}); fetch the file again.") from error


def _object(text: str, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{str(path)!r} is not readable JSON ({error}); fetch the file again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{str(path)!r} must hold a JSON object, not a {type(value).__name__}; fetch it again.")
    return value


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Role -> string of the special tokens; each is given as a string or as a dict with `content`."""
    found = {role: _content(config.get(role)) for role in _ROLES}
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or ()
    if not isinstance(extra, (dict, list, tuple)):
        raise CheckpointError("additional_special_tokens in tokenizer_config.json must be a list; fetch it again.")
    pairs = extra.items() if isinstance(extra, dict) else ((f"extra_{i}", token) for i, token in enumerate(extra))
    found.update({name: _content(token) for name, token in pairs})
    for content in (content for content in found.values() if content and not _is_text(content)):
        raise CheckpointError(f"a special token is {content!a}, which is no valid Unicode; fetch the files again.")
    return {role: content for role, content in found.items() if content}


def _is_text(content: str) -> bool:
    """False for half a surrogate pair, which JSON can spell."""
    return not any("\ud800" <= letter <= "\udfff" for letter in content)


def _content(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def token_ids(value: Any) -> list[int]:
    """Ids of a JSON value that is one, or a list of them; what is no integer is left out."""
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool)]


@contextmanager
def _panics_told(error_of: Callable[[str], Exception]) -> Iterator[None]:
    """What the tokenizer's native code says when it fails as `error_of` makes it: a panic is no Exception."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise error_of(" ".join(str(error).split())[:200]) from None


def _from_json(path: Path) -> tokenizers.Tokenizer:
    text = _text(path)
    try:
        too_much = excess(_object(text, path))
    except RecursionError as error:
        raise CheckpointError(f"{str(path)!r} is nested too deeply; fetch it again.") from error
    if too_much is not None:
        raise CheckpointError(f"{str(path)!r} cannot be used: {too_much}; take another tokenizer.")
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"{str(path)!r} is damaged or of an unknown kind ({error}); fetch it again.") from error


def _from_vocab(
    path: Path, config: Mapping[str, Any], named: Mapping[str, str], add_bos_token: bool
) -> tokenizers.Tokenizer:
    """GPT-2's byte-level BPE from vocab.json and merges.txt; OPT's puts its first token before every text."""
    try:
        model = models.BPE.from_file(str(path / "vocab.json"), str(path / "merges.txt"))
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(
            f"vocab.json or merges.txt in {str(path)!r} is damaged ({error}); fetch them again."
        ) from error
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space", False)))
    backend.decoder = decoders.ByteLevel()
    first = [named["bos_token"]] if add_bos_token else []
    last = [named["eos_token"]] if config.get("add_eos_token", False) else []
    ids = {content: backend.token_to_id(content) for content in first + last}
    for content in (content for content, token in ids.items() if token is None):
        raise CheckpointError(
            f"tokenizer_config.json in {str(path)!r} puts {content!r} around texts, but vocab.json lacks it."
        )
    if ids:
        backend.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last], pair=[*first, "$A", "$B", *last], special_tokens=list(ids.items())
        )
    return backend


def _is_id(text: str) -> bool:
    """Digits that are a number, which not all are, and one that an id can be."""
    return text.isascii() and text.isdigit() and len(text) <= 9


def _is_entry(key: str, token: Any) -> bool:
    content = _content(token)
    flags = all(isinstance(token[flag], bool) for flag in _FLAGS if flag in token) if isinstance(token, dict) else False
    return _is_id(key) and bool(content) and _is_text(content or "") and flags


def _add_listed(backend: tokenizers.Tokenizer, listed: Any, path: Path) -> None:
    """Add tokenizer_config.json's `added_tokens_decoder` (id -> token) where the other files lack them."""
    if not isinstance(listed, dict) or not all(_is_entry(key, token) for key, token in listed.items()):
        raise CheckpointError(
            f"added_tokens_decoder in {str(path)!r} must map ids to tokens with their content; fetch the files again."
        )
    known = backend.get_added_tokens_decoder()
    for key, token in sorted(listed.items(), key=lambda item: int(item[0])):
        if int(key) in known:
            continue
        flags = {k: v for k, v in token.items() if k in _FLAGS}
        backend.add_tokens([AddedToken(token["content"], **flags)])
        found = backend.token_to_id(token["content"])
        if found != int(key):
            raise CheckpointError(
                f"token {token['content']!r} has id {key} in tokenizer_config.json of {str(path)!r}, but {found} in the"
                " vocabulary; fetch the files again."
            )
