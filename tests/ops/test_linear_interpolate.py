"""Choices for shapes that nobody has measured, judged on those of the shipped profile, leaving one out at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from cellar.models.registry import open_model, shipped_config
from cellar.ops.linear.choice import Flat, Gemv, Kernel, LinearChoice, Shape, Timing, default_choice, timings_of
from cellar.ops.linear.interpolate import interpolated
from cellar.runtime.probes.linear import chooser_of, matrices_of
from cellar.runtime.probes.registry import shipped

MEASURED = timings_of(shipped("h200").tables)
DECODES = ("llama-2-13b", "llama-3-70b", "qwen3-14b", "qwen3-32b", "opt-30b", "mistral-7b")


def seconds(timing: Timing, kernel: Kernel) -> float:
    """Of the kernel's implementation in its best sizes: the profile keeps no others."""
    found = timing.gemv if isinstance(kernel, Gemv) else timing.flat if isinstance(kernel, Flat) else timing.library
    assert found is not None, f"{kernel} cannot multiply {timing.m} tokens"
    return found


def losses(choose: Callable[[Shape], LinearChoice]) -> Iterator[float]:
    """How much longer than the measured best each choice takes, as a part of that."""
    for shape, timings in MEASURED.items():
        choice = choose(shape)
        for timing in timings:
            best = min(s for s in (timing.gemv, timing.flat, timing.library) if s is not None)
            yield seconds(timing, choice.at(timing.m)) / best - 1


def without(shape: Shape) -> LinearChoice:
    choice = interpolated({other: timings for other, timings in MEASURED.items() if other != shape}, shape)
    assert choice is not None
    return choice


def test_a_shape_left_out_is_mostly_its_measured_best() -> None:
    """The worst are shares of ranks: much smaller than what lies near them."""
    found = list(losses(without))
    assert len(found) == 224
    assert max(found) < 0.11
    assert sum(found) / len(found) < 0.003
    assert sum(loss == 0 for loss in found) >= 200
    assert sum(loss < 0.01 for loss in found) >= 210


def test_the_rules_of_thumb_are_up_to_a_sixth_off_on_the_same_shapes() -> None:
    """And these were made from some of the same shapes. If this fails, they are better than what replaces them."""
    found = list(losses(lambda shape: default_choice(shape.n, shape.k)))
    assert 0.15 < max(found) < 0.17
    assert sum(found) > 1.7 * sum(losses(without))


@pytest.mark.parametrize("name", DECODES)
def test_models_without_a_profile_of_their_own_have_choices(name: str) -> None:
    choose = chooser_of([shipped("h200")])
    config = shipped_config(name)
    assert config is not None
    for matrix in matrices_of(open_model(config, "bfloat16").spec):
        choice = choose(Shape(matrix.n, matrix.k))
        assert choice is not None
        assert isinstance(choice.at(1), Gemv)
        flat = choice.at(16)
        assert flat is None or (isinstance(flat, Flat) and flat.depth * flat.splits <= matrix.k)


def test_a_measured_shape_keeps_what_was_measured() -> None:
    choose = chooser_of([shipped("h200")])
    for shape, timings in MEASURED.items():
        choice = choose(shape)
        assert choice is not None
        assert [choice.at(t.m) for t in timings] == [t.kernel for t in timings]


def test_the_nearest_shape_counts_most() -> None:
    slow, fast = [Timing(8, None, None, 2.0, 1.0)], [Timing(8, Flat(64, 128, 4, 1), None, 1.0, 2.0)]
    measured = {Shape(4096, 4096): slow, Shape(16384, 4096): fast}
    near_slow, near_fast = (interpolated(measured, Shape(n, 4096)) for n in (4100, 16000))
    assert near_slow is not None
    assert near_slow.at(8) is None
    assert near_fast is not None
    assert near_fast.at(8) == Flat(64, 128, 4, 1)


def test_what_is_far_from_everything_known_is_not_guessed() -> None:
    assert interpolated(MEASURED, Shape(64, 64)) is None
    assert interpolated(MEASURED, Shape(4096, 4096, "int4", 64)) is None
    assert interpolated({}, Shape(4096, 4096)) is None


def test_sizes_that_do_not_fit_the_shape_are_not_taken() -> None:
    sizes = Flat(64, 128, 4, 4)
    measured = {Shape(512, 512): [Timing(8, sizes, None, 1.0, 2.0)]}
    choice = interpolated(measured, Shape(512, 400))
    assert choice is not None
    assert choice.at(8) != sizes
