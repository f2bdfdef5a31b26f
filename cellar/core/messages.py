"""What crosses between deciding, doing and composing: frozen dataclasses over NumPy arrays.

Index letters used throughout: token i, layer j, batch k, row r, span s. All ranges are half-open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cellar.core.sampling import SamplingParams

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]


class Source(IntEnum):
    """Where a span's tokens come from: `StepPlan.tokens`, or the row's last sampled token on the device."""

    HOST = 0
    DEVICE = 1


class Emit(IntEnum):
    """What a span hands to the head.

    NONE: nothing (holes, inner prompt chunks). LAST: its last position is sampled.
    ALL: every position gets log-probabilities against `StepPlan.targets`; a last target of -1 is sampled.
    HIDDEN: the final hidden states are returned. SUM: their sum over the row's spans that emit it is.
    """

    NONE = 0
    LAST = 1
    ALL = 2
    HIDDEN = 3
    SUM = 4


class FinishReason(StrEnum):
    """Why a request ended; the values are OpenAI's and vLLM's."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Flag(IntEnum):
    """State of one result. NAN: the logits were not finite. FELL_BACK: a safe but slower kernel was used.

    LATE: the mask of the row did not come in time. Nothing was chosen; what steps under way make of the row is void.
    """

    OK = 0
    NAN = 1
    VOID = 2
    FELL_BACK = 3
    LATE = 4


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to be continued; n > 1 is several requests by now, which share `params` and `stop_ids`.

    `stop_ids` are the end symbols and stop ids that end it; `max_tokens` is at least 1 and fits the
    context; where the prompt is pooled it is 0, and the request ends with its prompt. Equal prefixes are shared between
    requests of equal `salt` only. `conversation` names the conversation
    that it continues, if its sender said so; it changes no token and no lookup. `seed` is this sequence's own; without
    it that of `params`, which is set then. Requests of one `owner` share its turns: see `schedule/steps/queue.py`;
    without a name each is its own. Owners of one `tenant` share that one's; without tenants all owners are equal.
    `output` are tokens that another engine has made of it already: it goes on behind them as if it had made them
    itself, and `max_tokens` counts them.
    """

    id: str
    prompt: IntArray
    params: SamplingParams
    stop_ids: frozenset[int]
    max_tokens: int
    priority: int = 0
    salt: bytes = b""
    conversation: str | None = None
    seed: int | None = None
    owner: str = ""
    tenant: str = ""
    output: IntArray | None = None

    @property
    def drawn_seed(self) -> int:
        """What its randomness is a function of, beside the output index."""
        return (self.params.seed or 0) if self.seed is None else self.seed


@dataclass(frozen=True, slots=True)
class Spans:
    """Positions [start, stop) of a row that a step computes, as a struct of arrays, each of length S.

    Spans of one row stand together and ascend. For device-sourced spans start and stop are upper bounds.
    """

    row: IntArray
    start: IntArray
    stop: IntArray
    source: IntArray
    emit: IntArray

    def __len__(self) -> int:
        return len(self.row)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return int((self.stop - self.start).sum())


@dataclass(frozen=True, slots=True)
class RowOpen:
    """A row is given to a request: how it samples, and how many output tokens it already has.

    `name` is the request's, for who keeps something by request. `seed` is the request's own; without it that of
    `params` counts. `prompt` and `output` are sent only if penalties need them, `output` also for structured output.
    `stop_ids` are forbidden until `params.min_tokens` output tokens exist. The row's slot table is all -1 after this,
    whatever the row held before: an open may come without a close.
    """

    row: int
    params: SamplingParams
    num_output: int = 0
    stop_ids: tuple[int, ...] = ()
    prompt: IntArray | None = None
    output: IntArray | None = None
    seed: int | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class TableUpdate:
    """table[row[i], column[i]] = slot[i]: chunk number `column` of the row's sequence lies in `slot`."""

    row: IntArray
    column: IntArray
    slot: IntArray


class Tier(IntEnum):
    """Where a chunk may lie, the fastest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    REMOTE = 3

    @property
    def persistent(self) -> bool:
        """Whether what lies there outlives the process. Such a tier is not memory: copies to and from it are staged."""
        return self >= Tier.DISK


@dataclass(frozen=True, slots=True)
class ChunkLabel:
    """What a chunk is, said to tiers that outlive the process, so that the next one finds it.

    `end` is the context length at its end in tokens, `parent` the identity of the chunk before it (or of the root), and
    `owner` that of the named conversation that it belongs to, or empty. `tokens`, int32 bytes, fill a partly filled
    tail and are empty for a whole chunk.
    """

    identity: bytes
    parent: bytes
    end: int
    owner: bytes = b""
    tokens: bytes = b""


@dataclass(frozen=True, slots=True)
class KeptChunk:
    """A chunk that a persistent tier has from before this process, written `age` seconds ago."""

    slot: int
    label: ChunkLabel
    age: float


@dataclass(frozen=True, slots=True)
class MemoryQuestion:
    """How many tokens of each conversation lie in which tier? With `forget` they are found nowhere after the answer,
    unless another conversation shares them, or one of the contexts to `keep` consists of them: (salt, int32 ids [n])
    each. With `pin_seconds` they leave a tier, for so long, after all that is not pinned; 0 ends a pin. With `flush`
    that tier drops whatever nobody uses, of any conversation; the answer ends with how many chunks that were, or with
    nothing if there is no such tier.
    """

    conversations: tuple[str, ...]
    forget: bool = False
    pin_seconds: float | None = None
    flush: Tier | None = None
    keep: tuple[tuple[bytes, IntArray], ...] = ()


MemoryAnswer = tuple[Mapping[Tier, int], ...]
"""Of each conversation, tokens by the fastest tier that has them; what lies nowhere is not counted."""


@dataclass(frozen=True, slots=True)
class CopyBatch:
    """Chunks to be copied from one tier to another, or within one: source_slots[k] -> target_slots[k], int32 [n].

    The copies begin when step `after_step` has been computed (-1: at once) and have ended when step `before_step`
    begins (-1: no step waits for them). The result of a load may come `lead` seconds before its last bytes: whoever
    uses the slots then waits in the runtime, each layer for its own part. Slots that a batch reads are not written, and
    those that it writes are not used, before its result. `labels` say what the chunks are, if source or target is
    persistent.
    """

    number: int
    source: Tier
    source_slots: IntArray
    target: Tier
    target_slots: IntArray
    after_step: int = -1
    before_step: int = -1
    lead: float = 0.0
    labels: tuple[ChunkLabel, ...] = ()

    def __len__(self) -> int:
        return len(self.source_slots)


@dataclass(frozen=True, slots=True)
class EraseBatch:
    """Chunks of a persistent tier that must never be found again: slots, int32 [n]. Answered by a CopyResult, too."""

    number: int
    tier: Tier
    slots: IntArray

    def __len__(self) -> int:
        return len(self.slots)


TierOrder: TypeAlias = CopyBatch | EraseBatch


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One transformer step: deltas of the rows, and the spans to compute.

    `tokens` are the ids of the host-sourced spans, one after another. `targets` are, for spans that emit
    ALL, the ids that follow each position (-1: none). Order: opens, table, compute, closes.
    """

    step: int
    spans: Spans
    tokens: IntArray
    table: TableUpdate
    opens: tuple[RowOpen, ...] = ()
    closes: tuple[int, ...] = ()
    targets: IntArray | None = None
    masked_rows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of m positions: the chosen token's, its rank (0 is best), and the n best.

    `index` [m] says which result (or prompt position) each belongs to. Arrays: [m], [m], [m, n], [m, n].
    Of the n best, entries beyond what the request asked for are to be ignored.
    """

    index: IntArray
    logprob: FloatArray
    rank: IntArray
    top_ids: IntArray
    top_logprobs: FloatArray


@dataclass(frozen=True, slots=True)
class StepResult:
    """Tokens of the spans that sampled, in span order: tokens[r, k], of which num_tokens[r] are valid.

    `logprobs.index` counts results; `prompt_logprobs` maps a row to the log-probabilities of the
    *targets* of its ALL spans, `index` being the target's position in the sequence. `hidden` maps a row to its
    final hidden states: [positions, hidden] of HIDDEN spans, their sum [1, hidden] of SUM spans. `failed` says of rows
    why they could not be opened: all results of theirs are void.
    `error` is set, and all else empty, if the step failed as a whole.
    """

    step: int
    tokens: IntArray
    num_tokens: IntArray
    flags: IntArray
    logprobs: Logprobs | None = None
    prompt_logprobs: Mapping[int, Logprobs] = field(default_factory=dict)
    hidden: Mapping[int, FloatArray] = field(default_factory=dict)
    seconds: float = 0.0
    error: str | None = None
    failed: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CopyResult:
    """Outcome of the CopyBatch (or EraseBatch) of that number: ok[k] says that chunk k has arrived (is gone), bool [n].

    A load that failed is a hole, to be computed again; a store that failed has not happened. `error` says why the first
    of them failed. The result of a batch comes before that of the step that waits for it.
    """

    number: int
    ok: NDArray[np.bool_]
    nbytes: int = 0
    seconds: float = 0.0
    error: str | None = None


class EventKind(StrEnum):
    """What a scheduler may wait for besides the results of its plans."""

    COPY = "copy"
    STAGE = "stage"
    GRAMMAR = "grammar"
    TIMER = "timer"


@dataclass(frozen=True, slots=True)
class Event:
    """Something is awaited: a result that will come by itself, or (TIMER) the moment `at`, in seconds on the clock. For
    a result, too, nobody waits longer than until `at`.
    """

    kind: EventKind
    at: float | None = None


@dataclass(slots=True)
class StepOutput:
    """What one commit delivers: ids[k] got tokens[k]; `finished` says which ended, why, and by which stop id or error.

    A request may appear in `finished` without a token (an error). `logprobs[id]` and
    `prompt_logprobs[id]` are there if asked for; `num_cached_tokens[id]` comes with a request's first token:
    how many tokens of its prompt were found in the cache; `queue_seconds[id]` likewise: how long it waited for
    its first step. Both come with `pooled[id]`, float32 [hidden], of a request whose prompt is pooled.
    """

    ids: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finished: dict[str, tuple[FinishReason, int | str | None]] = field(default_factory=dict)
    logprobs: dict[str, Logprobs] = field(default_factory=dict)
    prompt_logprobs: dict[str, Logprobs] = field(default_factory=dict)
    num_cached_tokens: dict[str, int] = field(default_factory=dict)
    queue_seconds: dict[str, float] = field(default_factory=dict)
    pooled: dict[str, FloatArray] = field(default_factory=dict)

    @classmethod
    def refusal(cls, reasons: Mapping[str, str]) -> StepOutput:
        """Requests that could not run, and why."""
        return cls(finished={id: (FinishReason.ERROR, reason) for id, reason in reasons.items()})


@dataclass(frozen=True, slots=True)
class EngineRates:
    """What an engine has learned of its speed, 0 where nothing has run yet: seconds of a unit of prompts' costs, and of
    a step of decodes alone; by tier, seconds of a load and of each of its chunks.
    """

    cost: float = 0.0
    decode: float = 0.0
    load: Mapping[Tier, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Outlook:
    """What a router wants to know of an engine: how long a prompt would wait there, and what need not be computed.

    `pending` are the positions [start, stop) of prompts that are yet to be computed, int32 [n, 2]; `requests` wait or
    run in all, with `context_tokens`. The device's tokens of K and V are free, cached (nobody uses them), or used.
    `keys` are the first 64 bits of the identities of the chunks that can be read in each tier, `rates` how fast it is.
    """

    pending: IntArray
    requests: int
    context_tokens: int
    free_tokens: int
    cached_tokens: int
    total_tokens: int
    keys: Mapping[Tier, NDArray[np.uint64]]
    rates: EngineRates = EngineRates()


@dataclass(frozen=True, slots=True, eq=False)
class Resting:
    """Chunks that an engine alone has and that a tier shared with others could keep: [n] each.

    `ends` are the tokens of context at a chunk's end. Equal `users` are the same conversations, in any number, and
    `weights` say how soon they are likely to go on, in any unit. A chunk takes `write` seconds to be written (0: not
    known yet).
    """

    chunks: IntArray
    ends: IntArray
    users: IntArray
    weights: NDArray[np.float64]
    write: float
    rates: EngineRates


@dataclass(frozen=True, slots=True)
class TierStats:
    """Slots of a tier: free + cached + referenced == total, those that only copies use being cached; and what moved.

    Counted since the engine started: chunks `loaded` from this tier to the device and `saved` to it from a faster one,
    the bytes and seconds of both, chunks `failed` in either, and prompt tokens that were found here (`hit_tokens`).
    """

    tier: Tier
    total: int
    free: int
    cached: int
    referenced: int
    loaded: int = 0
    saved: int = 0
    failed: int = 0
    load_seconds: float = 0.0
    save_seconds: float = 0.0
    load_nbytes: int = 0
    save_nbytes: int = 0
    hit_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A snapshot for metrics and progress bars; totals count since the engine started. `tiers`: the fastest first.

    `recomputed_tokens` had been computed before, as far as is known, and were computed again: holes before what was
    found, what was found where loading takes longer, and what a suspended request has lost.
    `steps[b]` steps computed more than 2**(b - 1) tokens and at most 2**b, `step_tokens` in all of them.
    """

    running: int
    waiting: int
    total_chunks: int
    free_chunks: int
    cached_chunks: int
    prefix_queries: int
    prefix_hits: int
    preemptions: int
    prompt_tokens: int
    generation_tokens: int
    tiers: tuple[TierStats, ...] = ()
    recomputed_tokens: int = 0
    steps: tuple[int, ...] = ()
    step_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Placed:
    """Rows [start, stop) of dimension 0 of one tensor lie on `device` in `format`.

    Places are named `device` (what the worker computes on), `host` and `disk`: only a runtime knows which those are.
    `compute` host: the CPU multiplies these rows where they lie in passes of few tokens; in others they move, too.
    """

    tensor: str
    device: str
    start: int
    stop: int
    format: str
    compute: str = "device"


@dataclass(frozen=True, slots=True)
class PlacedUnits:
    """`units` of KV (chunks) or of activations (sequences of a block) lie on `device`.

    `compute` says where attention to that KV runs.
    """

    device: str
    units: int
    compute: str


@dataclass(frozen=True, slots=True)
class BlockSchedule:
    """`num_batches` GPU batches of `batch` sequences pass each layer while its weights are there."""

    batch: int
    num_batches: int
    order: Literal["zigzag", "diagonal"] = "zigzag"


@dataclass(frozen=True, slots=True)
class Partition:
    """How a model is split: a mesh of x by y by z chips per pipeline stage, and as many whole copies as `replicas`.

    `*_gather` are the axes over which weights are gathered, `*_heads` those that cut the heads in attention. `looped`:
    prompts are sent in chunks beside their products.
    """

    mesh: tuple[int, int, int] = (1, 1, 1)
    outer: str = ""
    prefill_gather: str = ""
    prefill_heads: str = ""
    decode_gather: str = ""
    decode_heads: str = ""
    stages: int = 1
    micro_batches: int = 1
    replicas: int = 1
    looped: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """Which bytes live where, and when they move; the runtime executes exactly this.

    Split over several devices, `weights` are rows of each rank's own shard, as many for every rank: of a matrix whose
    columns are cut the shard has all rows. Layers of a pipeline lie on their own stage. A resident
    placement names its chunks of KV: so many slots the runtime has.
    """

    weights: tuple[Placed, ...]
    kv_device: str
    activation_device: str
    kind: Literal["resident", "partition", "offload"] = "resident"
    kv: tuple[PlacedUnits, ...] = ()
    activations: tuple[PlacedUnits, ...] = ()
    block: BlockSchedule | None = None
    partition: Partition | None = None

    @property
    def num_chunks(self) -> int:
        """Chunks of KV in all places."""
        return sum(part.units for part in self.kv)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One entry of a log-probability table, as vLLM returns it."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's n continuations.

    `reasoning` is what was thought before `text`, if the request tells them apart, in the first
    `num_reasoning_tokens` of the tokens, marks included.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: Sequence[dict[int, TokenLogprob] | None] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    reasoning: str = ""
    num_reasoning_tokens: int = 0


@dataclass(slots=True)
class RequestOutput:
    """A request with its continuations so far; `finished` once all have ended.

    `pooled` is the prompt's vector, float32 [hidden], if that was asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: Sequence[dict[int, TokenLogprob] | None] | None = None
    num_cached_tokens: int = 0
    queue_seconds: float = 0.0
    pooled: FloatArray | None = None
