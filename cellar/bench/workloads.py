"""Loads: who asks what, and when. Arrivals and lengths are drawn here, repeatable from a seed; no clock, no model.

A load is a number of conversations, each with the moment its first turn arrives; a plain request is a conversation
of one turn. Prompts are described, not spelled out (a production trace has 10^8 tokens): a prompt is a row of
pieces, equal pieces are equal tokens wherever they stand, and `Vocabulary` spells them. Times are in seconds.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cellar.bench.workload import LengthRange
from cellar.core.errors import ConfigError
from cellar.core.messages import IntArray

FloatArray: TypeAlias = NDArray[np.float64]

HASH_BLOCK = 512
"""Tokens behind one hash id of a Mooncake trace."""

_OWN = 1 << 40
"""Keys from here on belong to one prompt alone; keys below are shared prefixes, or a trace's hash ids."""


class Piece(NamedTuple):
    """`length` tokens, which are those of every other piece with this key, as far as both reach."""

    key: int
    length: int


@dataclass(frozen=True, slots=True)
class Turn:
    """What a user adds to a conversation, and how many tokens are to answer it.

    `think_time` passes between the end of the answer before and this turn. `text` is what is really said, where the
    dataset has it; the pieces then have its length only.
    """

    pieces: tuple[Piece, ...]
    output_tokens: int
    think_time: float = 0.0
    text: str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that this turn adds, its answer aside."""
        return sum(piece.length for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns, each of which is sent with all before it and their answers."""

    turns: tuple[Turn, ...]

    def contexts(self) -> list[int]:
        """Prompt length of each turn, if every answer has the length that was asked for."""
        found, length = [], 0
        for turn in self.turns:
            length += turn.num_tokens
            found.append(length)
            length += turn.output_tokens
        return found

    def within(self, max_context: int) -> Conversation | None:
        """The turns up to the first whose prompt and answer exceed a context; None if that is the first of all."""
        count = 0
        for context, turn in zip(self.contexts(), self.turns, strict=True):
            if context + turn.output_tokens > max_context:
                break
            count += 1
        return replace(self, turns=self.turns[:count]) if count else None


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """Conversation k begins at arrivals[k], in seconds; arrivals ascend."""

    conversations: tuple[Conversation, ...]
    arrivals: FloatArray

    def __post_init__(self) -> None:
        if len(self.conversations) != len(self.arrivals):
            raise ConfigError(f"{len(self.arrivals)} arrivals do not fit {len(self.conversations)} conversations.")

    @property
    def num_requests(self) -> int:
        """Turns of all conversations."""
        return sum(len(c.turns) for c in self.conversations)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, histories counted again with each turn."""
        return sum(sum(c.contexts()) for c in self.conversations)

    @property
    def num_output_tokens(self) -> int:
        """Tokens asked for."""
        return sum(turn.output_tokens for c in self.conversations for turn in c.turns)

    def within(self, max_context: int) -> Load:
        """Without the turns that exceed a context, and without conversations of which nothing is left."""
        kept = [(k, c) for k, one in enumerate(self.conversations) if (c := one.within(max_context)) is not None]
        return Load(tuple(c for _, c in kept), self.arrivals[[k for k, _ in kept]])


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Spells pieces with token ids drawn uniformly from [low, high); another seed gives other tokens."""

    low: int
    high: int
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise ConfigError(f"token ids in [{self.low}, {self.high}) are none; low must be below high.")

    def tokens(self, turn: Turn) -> IntArray:
        """int32 [num_tokens]."""
        if not turn.pieces:
            return np.empty(0, dtype=np.int32)
        return np.concatenate([self.piece(piece) for piece in turn.pieces])

    def piece(self, piece: Piece) -> IntArray:
        """int32 [length]: a function of seed, key and place alone."""
        bits = np.random.Philox(key=np.array([self.seed, piece.key], dtype=np.uint64))
        # Doubles are drawn one per token, so that a shorter piece is the beginning of a longer one.
        drawn = np.random.Generator(bits).random(piece.length) * (self.high - self.low)
        return drawn.astype(np.int32) + np.int32(self.low)


# -- arrivals -------------------------------------------------------------------------------------


def gamma_arrivals(count: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> FloatArray:
    """Ascending moments of `count` arrivals at `rate` per second; float64 [count].

    Intervals are gamma distributed with shape `burstiness` and mean 1 / rate: 1 is a Poisson process, less is more
    bursty, infinity is a metronome. They are scaled so that the last arrival is at count / rate: the offered rate is
    then the one asked for in short runs too, and a Poisson process given its last arrival is just that. An infinite
    rate is all at once.
    """
    if not rate > 0:
        raise ConfigError(f"request_rate is {rate}; it must be above 0, or inf for all at once.")
    if not burstiness > 0:
        raise ConfigError(f"burstiness is {burstiness}; it must be above 0.")
    if math.isinf(rate) or count == 0:
        return np.zeros(count)
    if math.isinf(burstiness):
        return np.arange(1, count + 1) / rate
    intervals = _random(seed, "arrivals").gamma(burstiness, 1.0, count)
    moments = np.cumsum(intervals)
    return np.asarray(moments * (count / rate / moments[-1]))


def spread_bins(stamps: FloatArray, seed: int = 0) -> FloatArray:
    """Ascending moments for ascending stamps that were rounded down to bins: uniform inside each bin, in order.

    A bin reaches to the next stamp, but is no longer than the usual distance of two stamps.
    """
    values, inverse = np.unique(stamps, return_inverse=True)
    if len(values) < 2:
        return stamps.copy()
    distance = np.diff(values)
    usual = float(np.median(distance))
    width = np.minimum(np.append(distance, usual), usual)
    drawn = _random(seed, "bins").random(len(stamps))
    order = np.lexsort((drawn, inverse))  # sorts the draws inside each bin; stamps ascend, so bins keep their places
    return np.asarray(values[inverse] + drawn[order] * width[inverse])


# -- datasets -------------------------------------------------------------------------------------


def length_range(length: int, ratio: float, name: str) -> LengthRange:
    """[length * (1 - ratio), length * (1 + ratio)], at least 1. Raises ConfigError that names the option."""
    if length < 1:
        raise ConfigError(f"{name} is {length}; it must be at least 1.")
    if not 0 <= ratio < 1:
        raise ConfigError(f"random_range_ratio is {ratio}; it must be in [0, 1).")
    return LengthRange(max(1, math.floor(length * (1 - ratio))), math.ceil(length * (1 + ratio)))


def random_requests(
    count: int,
    input_len: int,
    output_len: int,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
    seed: int = 0,
) -> tuple[Conversation, ...]:
    """Single requests; lengths are uniform in [len * (1 - ratio), len * (1 + ratio)], behind a common prefix."""
    random = _random(seed, "lengths")
    inputs = length_range(input_len, range_ratio, "random_input_len").draw(count, random)
    outputs = length_range(output_len, range_ratio, "random_output_len").draw(count, random)
    common = (Piece(0, prefix_len),) if prefix_len else ()
    return tuple(
        Conversation((Turn((*common, Piece(_OWN + k, int(inputs[k]))), int(outputs[k])),)) for k in range(count)
    )


def prefix_requests(
    count: int, prefix_len: int, suffix_len: int, num_prefixes: int, output_len: int, seed: int = 0
) -> tuple[Conversation, ...]:
    """Single requests that share `num_prefixes` beginnings, equally often, in random order."""
    for name, value in (("num_prefixes", num_prefixes), ("prefix_len", prefix_len), ("output_len", output_len)):
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1.")
    keys = _random(seed, "prefixes").permutation(np.arange(count) % num_prefixes)
    own = [(Piece(_OWN + k, suffix_len),) if suffix_len else () for k in range(count)]
    return tuple(Conversation((Turn((Piece(int(keys[k]), prefix_len), *own[k]), output_len),)) for k in range(count))


def random_conversations(
    count: int, turns: LengthRange, inputs: LengthRange, outputs: LengthRange, prefix_len: int = 0, seed: int = 0
) -> tuple[Conversation, ...]:
    """Conversations with a uniform number of turns, each of uniform lengths; `prefix_len` is a common system prompt."""
    random = _random(seed, "lengths")
    found = []
    key = _OWN
    for number in turns.draw(count, random).tolist():
        asked, answered = inputs.draw(number, random).tolist(), outputs.draw(number, random).tolist()
        said = []
        for k in range(number):
            common = (Piece(0, prefix_len),) if prefix_len and k == 0 else ()
            said.append(Turn((*common, Piece(key, asked[k])), answered[k]))
            key += 1
        found.append(Conversation(tuple(said)))
    return tuple(found)


def read_lengths(path: Path) -> list[list[tuple[int, int]]]:
    """Length sequences of real conversations: per turn the new tokens and those of the answer.

    The file is JSON: `[{"turns": [{"context_tokens": 331, "output_tokens": 319}, ...]}, ...]`, where the context of
    a turn includes everything before it. Raises ConfigError.
    """
    found = []
    for number, entry in enumerate(_json(path)):
        turns: list[tuple[int, int]] = []
        before = 0
        try:
            for turn in entry["turns"]:
                context, output = int(turn["context_tokens"]), int(turn["output_tokens"])
                if context <= before or output < 1:
                    raise ValueError(f"turn {len(turns)} adds no token or asks for none")
                turns.append((context - before, output))
                before = context + output
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"conversation {number} of {path} has no turns with context_tokens and output_tokens ({error!r}); "
                "give a file of lengths, or ShareGPT's JSON with a tokenizer."
            ) from error
        found.append(turns)
    return found


def is_sharegpt_text(path: Path) -> bool:
    """True if a file is ShareGPT's JSON itself, not a file of lengths."""
    entries = _json(path)
    return bool(entries) and isinstance(entries[0], dict) and "conversations" in entries[0]


def sharegpt_lengths(
    sequences: Sequence[Sequence[tuple[int, int]]],
    count: int,
    *,
    multi_turn: bool = False,
    output_len: int | None = None,
    seed: int = 0,
) -> tuple[Conversation, ...]:
    """`count` conversations with real lengths: every sequence once in random order, then all again.

    Without `multi_turn` each has its first exchange only, as in vLLM. `output_len` replaces the answers' lengths.
    """
    found = []
    key = _OWN
    for pick in _picks(len(sequences), count, seed):
        sequence = sequences[pick] if multi_turn else sequences[pick][:1]
        turns = []
        for asked, answered in sequence:
            turns.append(Turn((Piece(key, asked),), output_len or answered))
            key += 1
        found.append(Conversation(tuple(turns)))
    return tuple(found)


def sharegpt_texts(
    path: Path,
    count: int,
    num_tokens: Callable[[str], int],
    *,
    multi_turn: bool = False,
    output_len: int | None = None,
    seed: int = 0,
) -> tuple[Conversation, ...]:
    """`count` conversations of ShareGPT's own JSON, with its words; `num_tokens` is a tokenizer's count.

    As in vLLM, an exchange is used if question and answer have at least 4 tokens, at most 1024 in the question and
    2048 in both; a conversation ends before the first that is not.
    """
    entries = _json(path)
    order = _random(seed, "picks").permutation(len(entries)).tolist()
    found: list[Conversation] = []
    key = _OWN
    for number in order:
        turns: list[Turn] = []
        for asked, answered in _exchanges(entries[number]):
            question, answer = num_tokens(asked), output_len or num_tokens(answered)
            if question < 4 or question > 1024 or answer < 4 or question + answer > 2048:
                break
            turns.append(Turn((Piece(key, question),), answer, text=asked))
            key += 1
            if not multi_turn:
                break
        if turns:
            found.append(Conversation(tuple(turns)))
        if len(found) == count:
            break
    if not found:
        raise ConfigError(f"{path} has no conversation of a usable length; give another dataset.")
    return tuple(found[k % len(found)] for k in range(count))


def with_think_times(
    conversations: Iterable[Conversation], mean: float, distribution: str = "exponential", seed: int = 0
) -> tuple[Conversation, ...]:
    """The same, with a pause of `mean` seconds on average before every turn but the first.

    `distribution` is exponential or constant. Raises ConfigError.
    """
    if not 0 <= mean < math.inf:
        raise ConfigError(f"think_time is {mean}; it must be 0 or more seconds.")
    if distribution not in ("exponential", "constant"):
        raise ConfigError(f"think_time_distribution is {distribution!r}; use exponential or constant.")
    random = _random(seed, "think")
    found = []
    for conversation in conversations:
        count = len(conversation.turns)
        pauses = random.exponential(mean, count) if distribution == "exponential" else np.full(count, mean)
        pauses[0] = 0.0
        turns = (replace(t, think_time=float(p)) for t, p in zip(conversation.turns, pauses, strict=True))
        found.append(Conversation(tuple(turns)))
    return tuple(found)


# -- traces ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """A recorded hour of somebody's service. `hash_ids[k]` name the 512-token blocks of prompt k, where known."""

    stamps: FloatArray
    input_tokens: IntArray
    output_tokens: IntArray
    hash_ids: tuple[tuple[int, ...], ...] | None = None

    @property
    def is_binned(self) -> bool:
        """True if the stamps are so coarse that most requests share theirs."""
        return len(np.unique(self.stamps)) * 2 < len(self.stamps)

    def load(self, count: int | None = None, speedup: float = 1.0, seed: int = 0, copies: int = 1) -> Load:
        """The first `count` requests, `speedup` times as fast; stamps in bins are spread inside them.

        Of several copies each has users and texts of its own, and, where stamps are in bins, other moments in them.
        """
        if not speedup > 0:
            raise ConfigError(f"trace_speedup is {speedup}; it must be above 0.")
        size = len(self.stamps)
        drawn = [spread_bins(self.stamps, seed + c) if self.is_binned else self.stamps for c in range(copies)]
        moments = np.concatenate(drawn)
        order = np.argsort(moments, kind="stable")[: len(moments) if count is None else count]
        hashes = 1 + max((max(ids, default=0) for ids in self.hash_ids or ()), default=0)
        found = []
        for place in order.tolist():
            copy, k = divmod(place, size)
            pieces = self._pieces(k, copy * (size if self.hash_ids is None else hashes))
            found.append(Conversation((Turn(pieces, int(self.output_tokens[k])),)))
        return Load(tuple(found), (moments[order] - moments[order[0]]) / speedup)

    def _pieces(self, k: int, first: int) -> tuple[Piece, ...]:
        """Prompt k, its keys counted from `first` on."""
        length = int(self.input_tokens[k])
        if self.hash_ids is None:
            return (Piece(_OWN + first + k, length),)
        ids = self.hash_ids[k]
        return tuple(Piece(first + id, min(HASH_BLOCK, length - at * HASH_BLOCK)) for at, id in enumerate(ids))


def read_trace(path: Path) -> Trace:
    """A trace: Mooncake's JSON lines, or Azure's CSV as Microsoft or Vidur publish it. Raises ConfigError."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            trace = _mooncake(file) if path.suffix == ".jsonl" else _azure(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the trace {path} cannot be read ({error}); give a .jsonl or .csv file.") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} is not a known kind of trace ({error!r}); give Mooncake's .jsonl (timestamp, input_length, "
            "output_length, hash_ids) or Azure's .csv."
        ) from error
    if not len(trace.stamps):
        raise ConfigError(f"the trace {path} is empty; give one with requests.")
    return trace


def _mooncake(lines: Iterable[str]) -> Trace:
    rows = sorted((json.loads(line) for line in lines if line.strip()), key=lambda row: float(row["timestamp"]))
    for row in rows:
        if "hash_ids" in row and len(row["hash_ids"]) != -(-row["input_length"] // HASH_BLOCK):
            raise ValueError(f"{len(row['hash_ids'])} hash_ids for {row['input_length']} tokens")
    return Trace(
        stamps=np.array([row["timestamp"] for row in rows], dtype=np.float64) / 1e3,
        input_tokens=np.array([row["input_length"] for row in rows], dtype=np.int32),
        output_tokens=np.array([row["output_length"] for row in rows], dtype=np.int32),
        hash_ids=tuple(tuple(row["hash_ids"]) for row in rows) if rows and "hash_ids" in rows[0] else None,
    )


def _azure(rows: Iterable[Mapping[str, str]]) -> Trace:
    entries = list(rows)
    if entries and "TIMESTAMP" in entries[0]:
        dates = np.array([row["TIMESTAMP"] for row in entries], dtype="datetime64[ns]")
        stamps = (dates - dates.min()).astype(np.float64) / 1e9
        names = ("ContextTokens", "GeneratedTokens")
    else:
        stamps = np.array([float(row["arrived_at"]) for row in entries])
        names = ("num_prefill_tokens", "num_decode_tokens")
    lengths = np.array([[int(row[name]) for name in names] for row in entries], dtype=np.int32).reshape(-1, 2)
    order = np.argsort(stamps, kind="stable")
    return Trace(stamps[order], lengths[order, 0], lengths[order, 1])


# -- drawing --------------------------------------------------------------------------------------


def _random(seed: int, purpose: str) -> np.random.Generator:
    """A generator for one purpose: drawing more for one changes nothing for another."""
    return np.random.default_rng([seed, *purpose.encode()])


def _picks(available: int, count: int, seed: int) -> list[int]:
    if not available:
        raise ConfigError("the dataset is empty; give one with conversations.")
    random = _random(seed, "picks")
    rounds = [random.permutation(available) for _ in range(-(-count // available))]
    return np.concatenate(rounds)[:count].tolist() if rounds else []


def _exchanges(entry: Any) -> list[tuple[str, str]]:
    """Question and answer by turns, from the beginning, as far as they alternate."""
    messages = entry.get("conversations", []) if isinstance(entry, dict) else []
    found = []
    for asked, answered in zip(messages[::2], messages[1::2], strict=False):
        if asked.get("from") not in ("human", "user") or answered.get("from") not in ("gpt", "chatgpt", "assistant"):
            break
        found.append((asked["value"], answered["value"]))
    return found


def _json(path: Path) -> list[Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the dataset {path} cannot be read ({error}); give a JSON file.") from error
    if not isinstance(found, list):
        raise ConfigError(f"the dataset {path} is not a list; give a JSON list of conversations.")
    return found
