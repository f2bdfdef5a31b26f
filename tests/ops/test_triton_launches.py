"""A launch like an earlier one runs what that one ran, with its own arguments; another kind goes Triton's way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from cellar.ops import triton_launches
from cellar.ops.triton_launches import Launches, kind_of
from cellar.ops.triton_support import kernel, triton_available

if triton_available():
    import triton.language as tl

STREAM = 77


@dataclass
class _Parameter:
    name: str
    default: Any = None


@dataclass
class _Made:
    """What Triton leaves of a launch."""

    number: int
    ran: list[tuple[Any, ...]]

    @property
    def function(self) -> int:
        return 1000 + self.number

    @property
    def packed_metadata(self) -> tuple[int]:
        return (self.number,)

    def run(self, *given: Any) -> None:
        self.ran.append(given)


@dataclass
class _Triton:
    """A JITFunction of the parameters x, n, scale, BLOCK, FLAG = False."""

    made: list[_Made] = field(default_factory=list)
    ran: list[tuple[Any, ...]] = field(default_factory=list)
    params: tuple[_Parameter, ...] = (
        *map(_Parameter, ("x", "n", "scale", "BLOCK")),
        _Parameter("FLAG", default=False),
    )

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., _Made]:
        def launch(*args: Any, **kwargs: Any) -> _Made:
            self.made.append(_Made(len(self.made), self.ran))
            return self.made[-1]

        return launch


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> _Triton:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM + device, raising=False)
    monkeypatch.setattr(triton_launches, "_version", lambda: "3.6.0")
    return _Triton()


def test_a_launch_like_an_earlier_one_goes_straight_to_what_was_compiled(compiled: _Triton) -> None:
    launches = Launches(compiled)
    x, y = torch.zeros(64), torch.zeros(64)
    launches.launch(1, (4,), (x, 32, 0.5), {"BLOCK": 8, "num_warps": 4})
    launches.launch(1, (5, 2), (y, 48, 0.25), {"BLOCK": 8, "num_warps": 4})
    assert len(compiled.made) == 1
    assert compiled.ran == [(5, 2, 1, STREAM + 1, 1000, (0,), None, None, None, y, 48, 0.25, 8, False)]


@pytest.mark.parametrize(
    ("device", "args", "constants"),
    [
        (0, (torch.zeros(64), 32, 0.5), {"BLOCK": 8}),
        (1, (torch.zeros(64).half(), 32, 0.5), {"BLOCK": 8}),
        (1, (torch.zeros(64)[1:], 32, 0.5), {"BLOCK": 8}),
        (1, (torch.zeros(64), 33, 0.5), {"BLOCK": 8}),
        (1, (torch.zeros(64), 1, 0.5), {"BLOCK": 8}),
        (1, (torch.zeros(64), 2**31, 0.5), {"BLOCK": 8}),
        (1, (torch.zeros(64), 2**63, 0.5), {"BLOCK": 8}),
        (1, (torch.zeros(64), True, 0.5), {"BLOCK": 8}),
        (1, (torch.zeros(64), None, 0.5), {"BLOCK": 8}),
        (1, (torch.zeros(64), 32, 1), {"BLOCK": 8}),
        (1, (torch.zeros(64), 32, 0.5), {"BLOCK": 16}),
        (1, (torch.zeros(64), 32, 0.5), {"BLOCK": 8, "num_warps": 8}),
    ],
)
def test_whatever_triton_compiles_anew_for_goes_its_way(
    compiled: _Triton, device: int, args: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    launches = Launches(compiled)
    launches.launch(1, (4,), (torch.zeros(64), 32, 0.5), {"BLOCK": 8})
    launches.launch(device, (4,), args, constants)
    assert len(compiled.made) == 2
    assert not compiled.ran
    launches.launch(device, (4,), args, constants)
    assert [given[4] for given in compiled.ran] == [1001]


def test_a_truth_and_a_one_are_of_different_kinds() -> None:
    assert len({kind_of(1), kind_of(True), kind_of(1.0), kind_of(2), kind_of(16), kind_of(None)}) == 6
    assert kind_of(16) == kind_of(32) == kind_of(-16)


def test_arguments_of_which_only_triton_knows_what_they_are_always_go_its_way(compiled: _Triton) -> None:
    launches = Launches(compiled)
    for _ in range(2):
        launches.launch(0, (1,), (torch.zeros(4), [1, 2], 0.5), {"BLOCK": 8})
    assert len(compiled.made) == 2


def test_other_tritons_are_not_passed_by(compiled: _Triton, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launches, "_version", lambda: "3.7.1")
    launches = Launches(compiled)
    for _ in range(2):
        launches.launch(0, (1,), (torch.zeros(4), 3, 0.5), {"BLOCK": 8})
    assert len(compiled.made) == 2


@kernel
def _plus_kernel(x, y, out, n, plus, BLOCK: tl.constexpr = 0, TWICE: tl.constexpr = False):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(x + at, at < n, 0).to(tl.float32) + plus
    if y is not None:
        found += tl.load(y + at, at < n, 0)
    tl.store(out + at, found * 2 if TWICE else found, at < n)


@pytest.mark.gpu
def test_on_a_gpu_all_kinds_by_turns_are_right() -> None:
    """Each several times, so that most go the short way, also in another stream."""
    whole = torch.arange(80, device="cuda")
    other = torch.cuda.Stream()
    for turn in range(4):
        for n in (1, 16, 33, 48, 64):
            for dtype in (torch.float32, torch.bfloat16, torch.int32):
                for x in (whole.to(dtype)[:64], whole.to(dtype)[3:67]):
                    for y in (None, whole[:64].float() * turn):
                        for plus in (0.5, 3, 1):
                            for twice in (False, True):
                                out = torch.zeros(64, device="cuda")
                                other.wait_stream(torch.cuda.current_stream())
                                with torch.cuda.stream(other if turn % 2 else torch.cuda.current_stream()):
                                    _plus_kernel[(-(-n // 16),)](x, y, out, n, plus, BLOCK=16, TWICE=twice)
                                    assert torch.equal(out, _meant(x, y, n, plus, twice))


def _meant(x: Tensor, y: Tensor | None, n: int, plus: float, twice: bool) -> Tensor:
    found = (x.float() + plus + (0 if y is None else y)) * (2 if twice else 1)
    return torch.where(torch.arange(64, device=x.device) < n, found, 0.0)
