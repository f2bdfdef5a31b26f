"""What the launches of a decode step are for, and the fewest bytes and FLOPs of each kind.

A launch is known by its name, and what a name does not tell by its place: the linear layers of a step come in the order
of the model's specs, and what follows the last of them chooses tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from cellar.core.dtypes import DTYPE_BYTES
from cellar.core.specs import ModelSpec
from cellar.models.quantization import is_linear

EMBEDDING = "embedding"
NORM = "norms"
ROTARY = "rotary + KV write"
ATTENTION = "attention"
COMBINE = "attention combine"
ACTIVATION = "activation"
SAMPLING = "sampling"
COPIES = "copies"
OTHER = "other"
IDLE = "idle"

LINEAR = "linear"
_ROLES = {"gate_up": "gate/up", "lm_head": "head"}
_ORDER = (EMBEDDING, NORM, LINEAR, ROTARY, ATTENTION, COMBINE, ACTIVATION, SAMPLING, COPIES, OTHER, IDLE)


@dataclass(frozen=True, slots=True)
class Launch:
    """One operation of the device (on the CPU: of torch), from `start` to `stop` in nanoseconds.

    `source` is the file of ours that called it, if that is known.
    """

    name: str
    start: int
    stop: int
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Traffic:
    """The fewest bytes that must be moved, and the FLOPs, in one step, for `parts` uses of this kind.

    With fewer launches than uses the others are inside launches of another kind, which do without these bytes.
    """

    nbytes: int = 0
    flops: int = 0
    parts: int = 0

    def launched(self, count: float) -> Traffic:
        """What `count` launches of this kind are for."""
        if count >= self.parts:
            return self
        share = count / self.parts
        return Traffic(round(self.nbytes * share), round(self.flops * share), round(count))


def linear_kinds(spec: ModelSpec) -> list[str]:
    """The kind of each linear layer of a step, in the order in which they run."""
    return [_linear_kind(tensor.name) for tensor in spec.tensors() if is_linear(tensor)]


def in_order(kinds: Iterable[str]) -> list[str]:
    """Each kind once, in the order of a step."""

    def place(kind: str) -> int:
        return _ORDER.index(LINEAR if kind.startswith(LINEAR) else kind)

    # A stable sort: linear layers stay in the order in which they were met.
    return sorted(dict.fromkeys(kinds), key=place)


def traffic(spec: ModelSpec, tokens: int, context: float, sampled: int | None = None) -> dict[str, Traffic]:
    """Of a step of so many tokens with `context` positions to attend to on average, `sampled` rows of which (default:
    all, as where each decodes) get a next token.

    Linear layers: their weights. Attention: K and V. The others: the activations that they read and write.
    """
    size, sampled = DTYPE_BYTES[spec.dtype], tokens if sampled is None else sampled
    found: dict[str, Traffic] = {}

    def add(kind: str, nbytes: float, flops: float = 0.0) -> None:
        before = found.get(kind, Traffic())
        found[kind] = Traffic(before.nbytes + round(nbytes), before.flops + round(flops), before.parts + 1)

    linear = {tensor.name for tensor in spec.tensors() if is_linear(tensor)}
    groups = {group.name: group.row_nbytes / group.head_dim for group in spec.kv.groups}
    for operation in spec.operations(tokens, round(context), sampled):
        if operation.name in linear:
            add(_linear_kind(operation.name), operation.nbytes, operation.flops)
    for layer in spec.layers:
        for operation in layer.operations(tokens, round(context)):
            if operation.name == "attention":
                add(ATTENTION, operation.kv_elements * groups[layer.kv_group], operation.flops)
        kv_width, q_width = 2 * layer.num_kv_heads * layer.head_dim, layer.num_heads * layer.head_dim
        # k and v are read and written into the cache; q, if it is rotated, is read and written.
        add(ROTARY, 2 * tokens * (kv_width + (q_width if spec.rope is not None else 0)) * size)
        # The residual and what is added to it are read; their sum and its norm are written.
        for _ in range(2):
            add(NORM, 4 * tokens * spec.hidden_size * size)
        gates = sum(tensor.name == "gate_up" for tensor in layer.tensors)
        add(ACTIVATION, (2 + gates) * tokens * spec.intermediate_size * size)
    add(NORM, 4 * tokens * spec.hidden_size * size)
    add(EMBEDDING, 2 * tokens * spec.hidden_size * size)
    add(SAMPLING, sampled * spec.vocab_size * size)
    return found


def kinds_of(launches: Sequence[Launch], linears: Sequence[str]) -> list[str]:
    """The kind of each launch of some whole steps, given those of a step's linear layers in order.

    If the linear launches are no multiple of these, their roles cannot be told: all are `linear`.
    """
    products = [_is_product(launch) for launch in launches]
    known = bool(linears) and sum(products) % len(linears) == 0
    kinds: list[str] = []
    count, at = 0, LINEAR
    entering, leaving = True, False
    for launch, product in zip(launches, products, strict=True):
        if product:
            at = linears[count % len(linears)] if known else LINEAR
            count += 1
            entering, leaving = False, known and count % len(linears) == 0
            kinds.append(at)
            continue
        kind = _by_source(launch.source) if launch.source is not None else _by_name(launch.name)
        if kind == COPIES and leaving and _to_device(launch.name):
            entering, leaving = True, False
        if kind == LINEAR:
            kind = at
        elif kind is None:
            kind = SAMPLING if leaving else EMBEDDING if entering else OTHER
        kinds.append(kind)
    return kinds


def times_of(launches: Sequence[Launch], kinds: Sequence[str]) -> dict[str, int]:
    """Nanoseconds of each kind and of idleness, from the first start to the last stop; they add up to it.

    Where two launches overlap, the time counts for the one that began first: a kernel that is launched early waits.
    """
    found: dict[str, int] = {}
    done = launches[0].start if launches else 0
    for launch, kind in zip(launches, kinds, strict=True):
        found[IDLE] = found.get(IDLE, 0) + max(0, launch.start - done)
        found[kind] = found.get(kind, 0) + max(0, launch.stop - max(done, launch.start))
        done = max(done, launch.stop)
    return found


def _linear_kind(name: str) -> str:
    return f"{LINEAR} {_ROLES.get(name, name)}"


# Names of our kernels, of cuBLAS's, and of the CPU's operations.
_PRODUCT = re.compile(
    r"gemm|gemv|_flat_kernel|_rows_kernel|_tiles_kernel|^(mixed_)?product$|^product_of_(bytes|nibbles)$"
    r"|cutlass|nvjet|xmma|linear_dynamic_fp16|_linear_pointwise|aten::(linear|mm|addmm)$",
    re.IGNORECASE,
)
_PRODUCT_PART = re.compile(r"split_?k.*reduce|reduce.*split_?k|cublas|_expand_kernel|^written_out$", re.IGNORECASE)
_NAMES: Sequence[tuple[re.Pattern[str], str]] = tuple(
    (re.compile(pattern, re.IGNORECASE), kind)
    for pattern, kind in (
        (r"^(mem(cpy|set)|copy(host|device)to)", COPIES),
        (r"rotary|rope|write_kv", ROTARY),
        (r"atten.*(combine|merge|reduce)|(combine|merge|reduce).*atten", COMBINE),
        (r"atten|flash", ATTENTION),
        (r"norm", NORM),
        (r"activation|gated|silu", ACTIVATION),
        (r"choose|penal|forbid|uniform|target|sampl|argmax", SAMPLING),
        (r"embedding", EMBEDDING),
        (_PRODUCT_PART.pattern, LINEAR),
    )
)
# The families of `cellar/ops`, and the one file elsewhere that moves bytes.
_FAMILIES: Mapping[str, str] = {
    "norm": NORM,
    "rotary": ROTARY,
    "attention": ATTENTION,
    "activation": ACTIVATION,
    "embedding": EMBEDDING,
    "sampling": SAMPLING,
    "linear": LINEAR,
    "quant": LINEAR,
    "transfer": COPIES,
}


def _is_product(launch: Launch) -> bool:
    if launch.source is not None and _by_source(launch.source) != LINEAR:
        return False
    return bool(_PRODUCT.search(launch.name)) and not re.search(r"split_?k.*reduce|reduce.*split_?k", launch.name, re.I)


def _by_name(name: str) -> str | None:
    return next((kind for pattern, kind in _NAMES if pattern.search(name)), None)


def _by_source(source: str) -> str:
    return _FAMILIES.get(_family(source), OTHER)


def _family(source: str) -> str:
    """`.../ops/linear/triton.py` -> `linear`; a file that lies in no family's folder is its own."""
    path = PurePath(source)
    return path.stem if path.parent.name in ("ops", "runtime") else path.parent.name


def _to_device(name: str) -> bool:
    return "HtoD" in name or "HostToDevice" in name
