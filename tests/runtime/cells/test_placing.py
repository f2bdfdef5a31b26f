"""Weights on another device: what cells share here they share there. The device "meta" has tensors without memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cellar.cells.seq2seq import DecoderCell
from cellar.runtime.cells.functions import placed_modules

META = torch.device("meta")


class Holder(nn.Module):
    """Holds a parameter of somebody else's, as itself or as a view of the whole."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight)
        self.register_buffer("scale", torch.ones(2))


def test_weights_that_cells_share_are_placed_once() -> None:
    first = nn.Linear(4, 3)
    cells = [first, Holder(first.weight), Holder(first.weight.data), nn.Sequential(first)]
    (placed,) = placed_modules([cells], META)
    weights = [placed[0].weight, placed[1].weight, placed[2].weight, placed[3][0].weight]
    assert {weight.device.type for weight in weights} == {"meta"}
    assert len({weight.untyped_storage()._cdata for weight in weights}) == 1
    assert placed[1].scale.untyped_storage()._cdata != placed[2].scale.untyped_storage()._cdata
    assert first.weight.device.type == "cpu"  # the user's own stays where it is


def test_a_decoder_and_its_reader_share_their_words() -> None:
    decoder = DecoderCell(20, 4, 8)
    ((read, write),) = placed_modules([[decoder.encoder(), decoder]], META)
    assert read.embedding.weight.untyped_storage()._cdata == write.embedding.weight.untyped_storage()._cdata


def test_equal_slices_are_shared_and_different_ones_are_not() -> None:
    whole = torch.zeros(6, 4)
    ((a, b, c),) = placed_modules([[Holder(whole[:3]), Holder(whole[:3]), Holder(whole[3:])]], META)
    assert a.weight.untyped_storage()._cdata == b.weight.untyped_storage()._cdata
    assert a.weight.untyped_storage()._cdata != c.weight.untyped_storage()._cdata


def test_modules_that_are_there_already_are_taken_as_they_are() -> None:
    module = nn.Linear(4, 3)
    assert placed_modules([[module]], torch.device("cpu")) == [[module]]


@pytest.mark.gpu
def test_on_a_gpu_shared_words_take_their_memory_once() -> None:
    device = torch.device("cuda", 0)
    decoder = DecoderCell(50_000, 64, 64)
    words = decoder.embedding.weight.nbytes
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    ((read, write),) = placed_modules([[decoder.encoder(), decoder]], device)
    functions = [read.on_rows(device), write.on_rows(device)]
    grown = torch.cuda.memory_allocated(device) - before
    assert 2 * words < grown < 2.5 * words  # the words, and the decoder's projection onto them
    assert functions
