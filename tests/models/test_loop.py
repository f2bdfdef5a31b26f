"""Looped collective products, and weights gathered a layer ahead: what they compute is what is computed without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cellar.core.layouts import Layout, Mesh
from cellar.core.loops import LOOP_TOKENS, chunk_sizes
from cellar.models import loop as loops
from cellar.models.laid import Laid, Whole
from cellar.models.loop import Ahead, Loop, Steps, looped
from cellar.models.points import FeedForward, feed_forward, summed_linear
from cellar.models.views import View
from cellar.ops.linear.definition import linear
from cellar.runtime.mesh.threads import ThreadCollectives, ThreadMesh
from cellar.runtime.ranks.lane import HostLane
from tests.models.fake_comm import ThreadComm, on_ranks
from tests.models.laid_run import LaidRank, Span
from tests.models.test_layouts import HOMES, STEPS, check_bytes, name, pieces, steps, wanted

TOKENS, EMBED, WIDE = 11, 8, 16


class Watched:
    """A lane that does its work where it is waited for, and notes what happens when."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.count = 0

    def run(self, work: Callable[[], Tensor]) -> Ahead[Tensor]:
        self.notes.append(f"send {self.count}")
        self.count += 1
        return _Late(self, self.count - 1, work)

    def open(self) -> bool:
        return True


class _Late:
    def __init__(self, lane: Watched, number: int, work: Callable[[], Tensor]) -> None:
        self.lane = lane
        self.number = number
        self.work = work

    def result(self) -> Tensor:
        self.lane.notes.append(f"wait {self.number}")
        return self.work()


def test_a_chunk_is_sent_before_the_next_is_multiplied_and_waited_for_after() -> None:
    lane = Watched()

    def product(x: Tensor) -> Steps[Tensor]:
        lane.notes.append(f"multiply {int(x[0])}")
        y = yield lambda: 10 * x
        lane.notes.append(f"take {int(x[0])}")
        return y + 1

    assert looped(Loop(lane, 2), product, torch.arange(6)).tolist() == [1, 11, 21, 31, 41, 51]
    first = ["multiply 0", "send 0", "multiply 2", "send 1", "multiply 4", "send 2"]
    assert lane.notes == [*first, "wait 0", "take 0", "wait 1", "take 2", "wait 2", "take 4"]


def test_chunks_are_those_that_the_planner_counts() -> None:
    assert chunk_sizes(2 * LOOP_TOKENS - 1) == [2 * LOOP_TOKENS - 1]
    assert chunk_sizes(2 * LOOP_TOKENS + 1) == [LOOP_TOKENS + 1, LOOP_TOKENS]
    assert chunk_sizes(100 * LOOP_TOKENS) == [25 * LOOP_TOKENS] * 4


def test_a_lane_that_is_closed_leaves_a_step_whole() -> None:
    lane = Watched()
    lane.open = lambda: False  # type: ignore[method-assign]
    assert Loop(lane, 2).sizes(100) == [100]


def integers(*shape: int, seed: int) -> Tensor:
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.parametrize("gated", [True, False])
def test_products_and_their_sums_are_exact_on_integers(gated: bool) -> None:
    """Of four ranks with plain sums, relu between the products: every number is an integer, so nothing may differ."""
    size = 4
    x, beside = integers(TOKENS, EMBED, seed=1), integers(size, TOKENS, EMBED, seed=2)
    up = integers(size, (2 if gated else 1) * WIDE, EMBED, seed=3)
    down = integers(size, EMBED, WIDE, seed=4)

    def fed(r: int) -> Tensor:
        h = linear(x, up[r])
        f = torch.relu(h[:, :WIDE]) * h[:, WIDE:] if gated else torch.relu(h)
        return linear(f, down[r]) + beside[r]

    def one(rank: int, comm: ThreadComm) -> tuple[Tensor, Tensor]:
        comm.loop = Loop(HostLane(), 3)
        layer = FeedForward(up[rank], None, "relu", down[rank], None, gated)
        return feed_forward(x, layer, comm, beside[rank]), summed_linear(x, down[rank].t(), None, comm)

    for found, product in on_ranks(size, one):
        assert torch.equal(found, sum(fed(r) for r in range(size)))
        assert torch.equal(product, sum(linear(x, down[r].t()) for r in range(size)))


@pytest.mark.parametrize("mesh", [Mesh(2, 1, 2), Mesh(1, 2, 2)], ids=name)
def test_a_layouts_products_are_exact_on_integers(mesh: Mesh) -> None:
    """2D: sums over x within the feed-forward; 1D: shares of sums alone."""
    layout = Layout(mesh, "", "zyx")
    x, up, down = integers(TOKENS, EMBED, seed=1), integers(WIDE, EMBED, seed=2), integers(EMBED, WIDE, seed=3)

    def cut(whole: Tensor, dim: int, axes: str, rank: int) -> Tensor:
        return whole.chunk(mesh.count(axes), dim)[mesh.index(rank, axes)]

    def one(c: ThreadCollectives) -> Tensor:
        comm = Laid(layout, c, Whole(EMBED, 4, 4, 0), (TOKENS,), Loop(HostLane(), 3))
        w_in = cut(cut(up, 0, layout.rest, c.rank), 1, "x", c.rank)
        w_out = cut(cut(down, 1, layout.rest, c.rank), 0, "x", c.rank)
        layer = FeedForward(w_in, None, "relu", w_out, None, gated=False)
        return feed_forward(cut(x, 1, "x", c.rank), layer, comm)

    expected = linear(torch.relu(linear(x, up)), down)
    for rank, found in enumerate(ThreadMesh(mesh).run(one)):
        assert torch.equal(found, cut(expected, 1, layout.stream, rank))


LAID = [
    ("llama", Mesh(1, 1, 2), ""),
    ("llama", Mesh(2, 1, 2), ""),
    ("qwen3", Mesh(2, 2, 2), "x"),
    ("opt", Mesh(2, 1, 2), ""),
    ("opt, norms last", Mesh(2, 1, 2), ""),
    ("falcon", Mesh(2, 1, 2), ""),
    ("gpt_bigcode", Mesh(1, 2, 2), "xy"),
    ("llama, int8", Mesh(1, 2, 2), "xyz"),
]


@pytest.mark.parametrize(("family", "mesh", "gather"), LAID, ids=name)
def test_a_looped_model_is_the_model(family: str, mesh: Mesh, gather: str) -> None:
    """Prompts in chunks, weights a layer ahead, and the same bits as without, on every rank, both times."""
    case, weights, layout = wanted(family), pieces(family, mesh), Layout(mesh, gather)

    def logits(looped: bool) -> Callable[[ThreadCollectives], list[dict[int, Tensor]]]:
        def one(c: ThreadCollectives) -> list[dict[int, Tensor]]:
            loop, ahead = (Loop(HostLane(), 3), HostLane()) if looped else (None, None)
            homes = [home % mesh.size for home in HOMES]
            rank = LaidRank(case.model, weights[c.rank], c, homes, loop, ahead)
            return [
                rank.step(layout, [Span(r, a, case.rows[r][a:b]) for r, a, b in spans]) for spans in steps()[:-STEPS]
            ]

        return one

    plain, first, again = (ThreadMesh(mesh).run(logits(looped)) for looped in (False, True, True))
    for number, spans in enumerate(steps()[:-STEPS]):
        for row, start, stop in spans:
            expected = case.logits[row][start:stop]
            for rank in range(mesh.size):
                torch.testing.assert_close(first[rank][number][row], expected, atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(first[rank][number][row], plain[rank][number][row], atol=1e-5, rtol=1e-5)
                assert torch.equal(first[rank][number][row], first[0][number][row])
                assert torch.equal(first[rank][number][row], again[rank][number][row])


def test_a_loop_sends_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut into chunks a step sends what it sends whole, to the byte; and a loop is what cut it."""
    layout, made = Layout(Mesh(2, 1, 2), "", "z"), []
    plain = LaidRank.__init__

    def with_loop(self: LaidRank, *args: object) -> None:
        plain(self, *args, Loop(HostLane(), 2), HostLane())  # type: ignore[arg-type]

    interleaved = loops._interleaved

    def noted(chunks: list[Steps[Tensor]], lane: HostLane) -> list[Tensor]:
        made.append(len(chunks))
        return interleaved(chunks, lane)

    monkeypatch.setattr(LaidRank, "__init__", with_loop)
    monkeypatch.setattr(loops, "_interleaved", noted)
    check_bytes("llama", layout, 3)
    assert set(made) == {4}
    check_bytes("llama", replace(layout, gather="x", head_axes=""), 3)


def test_the_next_layers_weights_are_gathered_while_one_is_computed() -> None:
    """Two layers at a time, in order, and nothing of a pass that was given up."""
    case, mesh = wanted("llama"), Mesh(1, 1, 2)
    layout, weights = Layout(mesh, "xyz"), pieces("llama", mesh)

    def one(c: ThreadCollectives) -> tuple[list[str], list[float]]:
        lane = Watched()
        view = View(case.model.spec, weights[c.rank], layout, c, lane)  # type: ignore[arg-type]
        sums: list[float] = []
        for stop in (1, 2):  # a pass that ends early, then a whole one
            view.begin(7)
            for j in range(stop):
                with view.at(j) as found:
                    lane.notes.append(f"compute {j}")
                    sums.append(float(found["gate_up"].sum()))  # type: ignore[union-attr]
        return lane.notes, sums

    for notes, sums in ThreadMesh(mesh).run(one):
        assert notes == ["send 0", "compute 0", "send 1", "compute 0", "wait 1", "compute 1"]
        assert sums[0] == sums[1] != sums[2]
