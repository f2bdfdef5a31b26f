"""What ranks over gloo send is what the planner counts: the layout's bytes, and those of the algorithms that run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from cellar.core import sums
from cellar.core.layouts import Layout, Layouts, Mesh
from cellar.runtime.mesh.account import Account
from cellar.runtime.ranks.place import LaidPlace
from tests.models.laid_run import LaidRank, Span
from tests.models.test_layouts import name, pieces, priced, wanted


def by_axes(account: Account) -> dict[tuple[str, str], tuple[int, int]]:
    """(kind, axes) -> (logical, moved) bytes."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for entry, logical in account.logical.items():
        before = found.get((entry.kind, entry.axes), (0, 0))
        found[entry.kind, entry.axes] = before[0] + logical, before[1] + account.moved[entry]
    return found


@pytest.mark.parametrize("once", [10, 2**20])
@pytest.mark.parametrize("layout", [Layout(Mesh(4, 1, 1)), Layout(Mesh(2, 1, 2), "", "z")], ids=name)
def test_bytes_of_layouts_and_of_algorithms_are_the_planners(
    layout: Layout, once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums at once and in pieces, of four and of two chips."""
    monkeypatch.setattr(sums, "ONE_SHOT_NBYTES", once)
    case, mesh, length = wanted("llama"), layout.mesh, 3
    weights = pieces("llama", mesh)

    def one(rank: int) -> Account:
        place = LaidPlace(rank, Layouts(layout, layout), str(tmp_path / "meeting"))
        seat = place.take(case.model, torch.device("cpu"))
        assert seat.laid is not None
        run = LaidRank(case.model, weights[rank], seat.laid.collectives, range(mesh.size))
        with torch.inference_mode():
            run.step(layout, [Span(r, 0, torch.arange(length)) for r in range(mesh.size)])
        return seat.laid.collectives.account

    with ThreadPoolExecutor(mesh.size) as threads:
        accounts = list(threads.map(one, range(mesh.size)))
    expected = {(part.kind, part.axes): (part.logical, part.moved) for part in priced(case, layout, mesh.size, length)}
    for account in accounts:
        assert by_axes(account) == expected
    (sent, moved) = expected["all-reduce", "x"]
    assert (moved == sent) == (mesh.x == 2 or once == 10), "pieces send what they must, four parts at once do not"
