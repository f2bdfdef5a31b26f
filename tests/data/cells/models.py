"""Models of cells for tests of the server: small, and one that does everything wrong on demand."""

from __future__ import annotations

import time

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cellar.cells import Cell, CellModel, Graph
from cellar.cells.heads import ClassifierHead
from cellar.cells.lstm import LSTMCell, TokenLSTMCell
from cellar.cells.seq2seq import DecoderCell

torch.manual_seed(1)

WORDS, HIDDEN = 50, 8
STATES = {"h": (HIDDEN,), "c": (HIDDEN,)}
CARRY = {"h": "h", "c": "c"}
SIZES = (1, 2, 4, 8)

words = Cell(
    "words", TokenLSTMCell(WORDS, HIDDEN, HIDDEN), ("h", "c"), batch_sizes=SIZES, shapes=STATES, high={"token": WORDS}
)
head = Cell("head", ClassifierHead(HIDDEN, 3), ("label", "logits"), priority=1, batch_sizes=SIZES)


def read(graph: Graph, tokens: list[int]) -> object:
    last = graph.chain(words, len(tokens), each={"token": tokens}, carry=CARRY).node(-1)
    made = graph.call(head, h=last["h"])
    return {"label": made["label"], "logits": made["logits"]}


classify = CellModel("classify", [words, head], read, {"tokens": [1, 2]})

steps = Cell("steps", LSTMCell(4, HIDDEN), ("h", "c"), batch_sizes=SIZES, shapes=STATES)


def follow(graph: Graph, x: NDArray[np.float32]) -> object:
    return graph.chain(steps, len(x), each={"x": x}, carry=CARRY)["h"]


features = CellModel("features", [steps], follow, {"x": np.zeros((2, 4), np.float32)})

encoder = Cell(
    "encoder", TokenLSTMCell(WORDS, HIDDEN, HIDDEN), ("h", "c"), batch_sizes=SIZES, shapes=STATES, high={"token": WORDS}
)
decoder = Cell(
    "decoder", DecoderCell(WORDS, HIDDEN, HIDDEN), ("token", "h", "c"), 1, batch_sizes=SIZES, high={"token": WORDS}
)


def say(graph: Graph, tokens: list[int], steps: int) -> object:
    last = graph.chain(encoder, len(tokens), each={"token": tokens}, carry=CARRY).node(-1)
    first = {"token": 1, "h": last["h"], "c": last["c"]}
    return {"token": graph.grow(decoder, steps, carry={"token": "token", **CARRY}, first=first)["token"]}


translate = CellModel("translate", [encoder, decoder], say, {"tokens": [1, 2], "steps": 2})


class Fragile(nn.Module):
    """Doubles, unless the first number says what is to go wrong."""

    def forward(self, x: Tensor) -> Tensor:
        if (x[:, 0] == 2).any():
            raise ValueError("a two cannot be doubled")
        if (x[:, 0] == 3).any():
            return x[:, :1]
        if (x[:, 0] == 4).any():
            time.sleep(0.001)
        return torch.where(x == 1, torch.nan, 2 * x)


fragile_cell = Cell("fragile", Fragile(), ("y",), batch_sizes=SIZES)


def break_it(graph: Graph, how: str, steps: int = 1) -> object:
    if how == "loop":
        while True:
            pass
    first = {"good": 0.5, "nan": 1.0, "raise": 2.0, "shape": 3.0, "slow": 4.0}
    if how == "nothing":
        return graph
    x = np.array([first[how], 7.0], np.float32)
    return graph.map(fragile_cell, steps, fixed={"x": x}).node(-1)["y"]


fragile = CellModel("fragile", [fragile_cell], break_it, {"how": "good"}, unfold_seconds=3.0)
