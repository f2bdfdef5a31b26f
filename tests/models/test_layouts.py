"""Every layout computes what one device computes, from one stored form, and sends the bytes that the planner prices."""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from cellar.core.errors import ConfigError
from cellar.core.layouts import Layout, Mesh
from cellar.models.laid import Laid
from cellar.models.loader import LoadedWeights, load
from cellar.models.model import Model
from cellar.models.quantization import quantized_on_loading
from cellar.models.registry import open_model
from cellar.models.stored import stored
from cellar.planner.cost import dimensions
from cellar.planner.layouts import relay_moves
from cellar.planner.partition import distinct_layouts, padded_heads
from cellar.planner.sharding import volume
from cellar.planner.traffic import StepSizes, Traffic, step_traffic
from cellar.runtime.mesh.account import Account
from cellar.runtime.mesh.threads import ThreadCollectives, ThreadMesh
from tests.conformance.chatglm import config_of
from tests.models.dense_context import logits_of
from tests.models.laid_run import LaidRank, Span
from tests.models.relay import relaid
from tests.models.test_halves import SIZES
from tests.models.test_sharding import stored_tensors

WIDE = SIZES | {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 12}
OPT = WIDE | {"model_type": "opt", "ffn_dim": 96, "word_embed_proj_dim": 64, "head_dim": None}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": WIDE | {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama, one head of K and V": WIDE | {"model_type": "llama", "num_key_value_heads": 1},
    "llama, all heads": WIDE | {"model_type": "llama", "num_key_value_heads": 8},
    "mistral": WIDE | {"model_type": "mistral", "sliding_window": 7, "num_key_value_heads": 4},
    "qwen2": WIDE | {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": WIDE | {"model_type": "qwen3", "head_dim": 24, "num_key_value_heads": 4},
    "opt": OPT,
    "opt, norms last": OPT | {"word_embed_proj_dim": 24, "do_layer_norm_before": False},
    "falcon": WIDE | {"model_type": "falcon", "hidden_size": 96, "bias": True, "eos_token_id": 2},
    "cohere": WIDE
    | {"model_type": "cohere", "hidden_size": 96, "attention_bias": True, "logit_scale": 0.5, "eos_token_id": 2},
    "gpt_bigcode": {
        "model_type": "gpt_bigcode",
        "vocab_size": 101,
        "n_embd": 96,
        "n_layer": 2,
        "n_head": 8,
        "eos_token_id": 2,
    },
    "chatglm": config_of(8, 2, 16, 64) | {"ffn_hidden_size": 96},
    "chatglm, own k and v of each head": config_of(8, 8, 16, 64, multi_query_attention=False) | {"ffn_hidden_size": 96},
}
MESHES = (Mesh(1, 1, 2), Mesh(2, 1, 1), Mesh(1, 2, 2), Mesh(2, 1, 2), Mesh(4, 1, 1), Mesh(2, 2, 2), Mesh(1, 2, 4))
SIX = {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 16}
QUANTIZED = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}
SPECIAL: dict[str, dict[str, Any]] = {
    "opt, six heads": OPT | {"hidden_size": 48, "word_embed_proj_dim": 48, "num_attention_heads": 6},
    "llama, six heads": WIDE | SIX | {"model_type": "llama", "attention_bias": True},
    "llama, int8": WIDE | QUANTIZED | {"model_type": "llama"},
    "llama, int4": WIDE | QUANTIZED | {"model_type": "llama"},
}
PROMPTS = (7, 3, 5, 1, 6, 2, 4, 5)  # tokens of each row's prompt
STEPS = 2  # decodes after it
HOMES = (0, 3, 1, 1, 6, 4, 7, 0)  # ranks, modulo their number: unequal shares, and places with nothing


@dataclass(frozen=True)
class Wanted:
    """A model, its checkpoint, its rows' tokens, and what one device computes of them."""

    model: Model
    folder: tempfile.TemporaryDirectory[str]
    directory: Path
    rows: list[Tensor]
    logits: list[Tensor]


@lru_cache(maxsize=32)
def wanted(family: str) -> Wanted:
    model = open_model((FAMILIES | SPECIAL)[family], "float32")
    folder = tempfile.TemporaryDirectory(prefix="cellar-layouts-")  # until the process ends
    directory = Path(folder.name)
    save_file(stored_tensors(model.spec), directory / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, model.spec.vocab_size, (n + STEPS,), generator=generator) for n in PROMPTS]
    if (quantization := family.split(", ")[-1]) in ("int8", "int4"):
        model = type(model)(quantized_on_loading(model.spec, quantization))  # type: ignore[call-arg]
    whole = load(model.spec, directory)
    logits = [logits_of(model, whole, tokens, [len(tokens)]) for tokens in rows]
    assert all(one.std() > 0.1 for one in logits), "logits this flat would hide errors"
    return Wanted(model, folder, directory, rows, logits)


@lru_cache(maxsize=128)
def pieces(family: str, mesh: Mesh) -> tuple[LoadedWeights, ...]:
    case = wanted(family)
    return tuple(load(stored(case.model.spec, mesh, rank), case.directory) for rank in range(mesh.size))


def steps() -> list[list[tuple[int, int, int]]]:
    """(row, start, stop) of each step: prompts, one of them in two pieces; decodes, which one row leaves early and one
    joins late.
    """
    late, early, cut = 2, 5, 4
    found = [[(r, 0, n if r != cut else 2) for r, n in enumerate(PROMPTS) if r != late]]
    found.append([(late, 0, PROMPTS[late]), (cut, 2, PROMPTS[cut])])
    for t in range(STEPS):
        found.append([(r, n + t, n + t + 1) for r, n in enumerate(PROMPTS) if not (r == early and t > 0)])
    return found


def check(family: str, mesh: Mesh, prefill: Layout, decode: Layout) -> None:
    case, weights = wanted(family), pieces(family, mesh)

    def one(c: ThreadCollectives) -> list[dict[int, Tensor]]:
        rank = LaidRank(case.model, weights[c.rank], c, [home % mesh.size for home in HOMES])
        found = []
        for number, spans in enumerate(steps()):
            layout = prefill if number < 2 else decode
            found.append(rank.step(layout, [Span(r, a, case.rows[r][a:b]) for r, a, b in spans]))
        return found

    found = ThreadMesh(mesh).run(one)
    for number, spans in enumerate(steps()):
        for row, start, stop in spans:
            expected = case.logits[row][start:stop]
            for mine in found:
                assert torch.equal(mine[number][row], found[0][number][row]), "every rank has the same bits"
            logits = found[0][number][row]
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
            assert torch.equal(logits.argmax(1), expected.argmax(1)), "greedy tokens"


def _all_layouts() -> list[tuple[str, Mesh, Layout]]:
    return [
        (family, mesh, layout)
        for family, config in FAMILIES.items()
        for mesh in MESHES
        for layout in distinct_layouts(mesh, open_model(config, "float32").spec.num_kv_heads)
    ]


ALL = _all_layouts()


def name(value: object) -> str:
    if isinstance(value, Layout):
        return f"{value.name}-{value.attention}-{value.head_axes}"
    return f"{value.x}{value.y}{value.z}" if isinstance(value, Mesh) else str(value)


# Every layout with every attention for two, four and eight ranks, of every family: some here, others in the long test.
SHORT = [case for number, case in enumerate(ALL) if number % 37 == 0]
LONG = [case for number, case in enumerate(ALL) if number % 37]


@pytest.mark.parametrize(("family", "mesh", "layout"), SHORT, ids=name)
def test_a_layout_is_the_model(family: str, mesh: Mesh, layout: Layout) -> None:
    check(family, mesh, layout, layout)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_all_other_layouts_are_the_model(family: str) -> None:
    for other, mesh, layout in LONG:
        if other == family:
            check(family, mesh, layout, layout)


def _pairs() -> list[tuple[str, Mesh, Layout, Layout]]:
    """A layout for prompts and another for decodes, of one mesh; caches that are repeated in parts cannot be moved."""
    found = []
    for family in FAMILIES:
        kv_heads = open_model(FAMILIES[family], "float32").spec.num_kv_heads
        for mesh in MESHES:
            layouts = [
                layout
                for layout in distinct_layouts(mesh, kv_heads)
                if layout.kv_copies(kv_heads) == 1 or kv_heads == mesh.count(layout.kv_axes(kv_heads))
            ]
            found += [(family, mesh, a, b) for a in layouts for b in layouts if a != b]
    return found


PAIRS = _pairs()


@pytest.mark.parametrize(("family", "mesh", "prefill", "decode"), PAIRS[::401], ids=name)
def test_prompts_in_one_layout_and_decodes_in_another(family: str, mesh: Mesh, prefill: Layout, decode: Layout) -> None:
    check(family, mesh, prefill, decode)


@pytest.mark.long
def test_more_prompts_in_one_layout_and_decodes_in_another() -> None:
    for case in PAIRS[7::61]:
        check(*case)


def test_a_moved_cache_sends_what_the_planner_says() -> None:
    """Integers, as many tokens for every home: exact, and to the byte."""
    kv_heads, length, width = 4, 3, 5
    for mesh in MESHES:
        layouts = [lay for lay in distinct_layouts(mesh, kv_heads) if lay.kv_copies(kv_heads) == 1]
        whole = torch.randint(-9, 9, (mesh.size * length, kv_heads, width))
        homes, lengths = dict(enumerate(range(mesh.size))), dict.fromkeys(range(mesh.size), length)

        def piece(layout: Layout, rank: int, mesh: Mesh = mesh, whole: Tensor = whole) -> Tensor:
            at = mesh.index(rank, layout.batch_axes)
            rows = [r for r in range(mesh.size) if mesh.index(r, layout.batch_axes) == at]
            mine = torch.cat([whole[r * length : (r + 1) * length] for r in rows])
            axes = layout.kv_axes(kv_heads)
            return mine.chunk(mesh.count(axes), 1)[mesh.index(rank, axes)]

        for source, target in itertools.product(layouts, layouts):
            one = partial(_moved_cache, piece, homes, lengths, source, target, kv_heads)
            sizes = {"B": float(mesh.size), "S": float(length), "K": float(kv_heads), "D": float(width)}
            priced = sum(
                volume(move.kind, move.before, move.after, move.axes, sizes, mesh)
                for move in relay_moves(source, target, kv_heads)
            )
            for rank, (found, sent) in enumerate(ThreadMesh(mesh).run(one)):
                assert torch.equal(found, piece(target, rank)), (source, target)
                assert sent == 8 * priced


def _moved_cache(
    piece: Callable[[Layout, int], Tensor],
    homes: dict[int, int],
    lengths: dict[int, int],
    source: Layout,
    target: Layout,
    kv_heads: int,
    c: ThreadCollectives,
) -> tuple[Tensor, int]:
    found = relaid(piece(source, c.rank), homes, lengths, source, target, kv_heads, c)
    return found, sum(c.account.logical.values())


@pytest.mark.parametrize("size", [4, pytest.param(8, marks=pytest.mark.long)])
@pytest.mark.parametrize("config", ["opt", "llama"])
def test_heads_that_do_not_divide_are_padded(config: str, size: int) -> None:
    """Six heads on four and eight chips, of K and V as many or one: filled up as the planner does, to its bytes."""
    family = f"{config}, six heads"
    d = padded_heads(dimensions(wanted(family).model.spec), size)
    assert d is not None
    assert d.heads == 8
    for mesh in [mesh for mesh in MESHES if mesh.size == size][:2]:
        for layout in distinct_layouts(mesh, d.kv_heads)[::3]:
            check(family, mesh, layout, layout)
            check_bytes(family, layout, 1)


@pytest.mark.parametrize("name", ["int8", pytest.param("int4", marks=pytest.mark.long)])
def test_quantized_weights(name: str) -> None:
    """Groups stay whole, and what is gathered are codes: 1 byte an element, and a half."""
    family = f"llama, {name}"
    check(family, Mesh(2, 1, 2), Layout(Mesh(2, 1, 2), "", "z"), Layout(Mesh(2, 1, 2), "x"))
    check(family, Mesh(1, 2, 1), Layout(Mesh(1, 2, 1), "xy"), Layout(Mesh(1, 2, 1), "", "zyx"))
    if name == "int8":
        check_bytes(family, Layout(Mesh(2, 1, 2), "xyz"), 1)


def test_a_cut_through_a_group_is_refused() -> None:
    spec = wanted("llama, int4").model.spec
    with pytest.raises(ConfigError, match="through a quantization group of 64; take fewer chips along 'x'"):
        stored(spec, Mesh(4, 1, 1), 0)


def priced(case: Wanted, layout: Layout, batch: int, length: int) -> tuple[Traffic, ...]:
    """What the planner counts of a float32 step of which every token is sampled."""
    spec = case.model.spec
    d = padded_heads(dimensions(spec), layout.mesh.size)
    assert d is not None
    words = spec.embedding[0].shape[1]
    step = StepSizes(
        batch,
        length,
        item=4,
        weight_bytes=1 if spec.layers[0].tensors[1].formats else 4,
        words=None if words == d.embed else words,
        norm_last=not spec.options.get("norm_first", True),
        sampled=length,
    )
    return step_traffic(d, layout, step)


def check_bytes(family: str, layout: Layout, length: int) -> None:
    """Of every collective, on every rank, to the byte: as many tokens for every home, prompts and decodes."""
    mesh, case = layout.mesh, wanted(family)
    weights = pieces(family, mesh)

    def one(c: ThreadCollectives) -> Account:
        rank = LaidRank(case.model, weights[c.rank], c, range(mesh.size))
        rank.step(layout, [Span(r, 0, torch.arange(length)) for r in range(mesh.size)])
        return c.account

    expected = {(one.kind, one.axes): one.logical for one in priced(case, layout, mesh.size, length)}
    for account in ThreadMesh(mesh).run(one):
        sent: Counter[tuple[str, str]] = Counter()
        for entry, nbytes in account.logical.items():
            if not entry.name.endswith("scales"):
                sent[entry.kind, entry.axes] += nbytes
        assert sent == expected, layout
        assert sum(account.moved.values()) >= sum(account.logical.values()) / 2


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("llama", Mesh(2, 2, 2)),
        ("opt", Mesh(4, 1, 2)),
        ("llama, one head of K and V", Mesh(2, 2, 1)),
        ("falcon", Mesh(2, 1, 2)),
        ("cohere", Mesh(2, 1, 2)),
        ("opt, norms last", Mesh(2, 1, 2)),
        pytest.param("llama", Mesh(1, 2, 4), marks=pytest.mark.long),
        *(pytest.param(family, Mesh(2, 2, 2), marks=pytest.mark.long) for family in FAMILIES if family != "llama"),
    ],
    ids=name,
)
def test_the_bytes_are_the_planners(family: str, mesh: Mesh) -> None:
    for layout in distinct_layouts(mesh, wanted(family).model.spec.num_kv_heads):
        for length in (3, 1):
            check_bytes(family, layout, length)


def test_a_move_that_is_left_out_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparisons above can fail: results without a sum, bytes with a collective that does the same for more."""
    layout = Layout(Mesh(2, 1, 2), "", "")
    with monkeypatch.context() as patch:
        patch.setattr(Laid, "widened", lambda self, f: f.repeat(1, 2))
        with pytest.raises(AssertionError):
            check("llama", layout.mesh, layout, layout)

    def summed_whole(self: Laid, x: Tensor) -> Tensor:
        return self.kept(self.collectives.all_reduce(x, self.layout.rest, "y"))

    monkeypatch.setattr(Laid, "all_reduce", summed_whole)
    check("llama", layout.mesh, layout, layout)
    with pytest.raises(AssertionError):
        check_bytes("llama", layout, 1)


def test_what_has_no_equal_shares_is_refused() -> None:
    spec = wanted("llama").model.spec
    with pytest.raises(ConfigError, match="hidden size of 64 has no equal shares for 3 chips"):
        stored(spec, Mesh(3, 1, 1), 0)
    with pytest.raises(ConfigError, match="8 heads with 2 heads of K and V have no equal shares for 16 chips"):
        stored(spec, Mesh(4, 2, 2), 0)
    with pytest.raises(ConfigError, match="rank 8 is not one of 8"):
        stored(spec, Mesh(2, 2, 2), 8)
