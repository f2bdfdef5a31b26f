"""The three models of BatchMaker §2.7 as cells, with random weights: the same in every process, from the seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.cells.sentences import Sentences
from benchmarks.cells.setup import GO, Setup
from benchmarks.cells.trees import Tree, vocabulary
from cellar.cells import Cell, CellModel, Graph
from cellar.cells.lstm import LSTMStack, TokenLSTMCell
from cellar.cells.seq2seq import DecoderCell
from cellar.cells.tree_lstm import TreeInner, TreeLeaf

Fields = dict[str, Any]

WIRES = ({"h_left": "h", "c_left": "c"}, {"h_right": "h", "c_right": "c"})


def batch_sizes(most: int) -> tuple[int, ...]:
    """Powers of two up to `most`, and `most`."""
    return (*(1 << k for k in range(most.bit_length()) if 1 << k < most), most)


def modules(setup: Setup, num_words: int | None = None) -> dict[str, nn.Module]:
    """The cells' modules by name, on the setup's device."""
    torch.manual_seed(setup.seed)
    h, words = setup.hidden, num_words or setup.words
    made: dict[str, nn.Module]
    if setup.model == "lstm":
        made = {"lstm": TokenLSTMCell(words, h, h)}
    elif setup.model == "seq2seq":
        made = {"encoder": TokenLSTMCell(words, h, h), "decoder": DecoderCell(words, h, h)}
    else:
        made = {"leaf": TreeLeaf(words, h, h), "inner": TreeInner(h)}
    return {name: module.to(setup.torch_device, setup.torch_dtype).eval() for name, module in made.items()}


def cell_model(setup: Setup, num_words: int | None = None) -> CellModel:
    """The model as a user writes it."""
    made = modules(setup, num_words)
    assert setup.max_batch is not None
    sizes = batch_sizes(setup.max_batch)
    states = {"h": (setup.hidden,), "c": (setup.hidden,)}
    if setup.model == "lstm":
        lstm = Cell("lstm", made["lstm"], ("h", "c"), batch_sizes=sizes, shapes=states, high={"token": setup.words})

        def classify(graph: Graph, tokens: np.ndarray) -> Any:
            steps = graph.chain(lstm, len(tokens), each={"token": tokens}, carry={"h": "h", "c": "c"})
            return steps.node(-1)["h"]

        return CellModel("lstm", [lstm], classify, {"tokens": np.array([1, 2])})
    if setup.model == "seq2seq":
        assert setup.decoder_batch is not None
        encoder = Cell(
            "encoder",
            made["encoder"],
            ("h", "c"),
            priority=1,  # see `cellar.cells.seq2seq`
            batch_sizes=sizes,
            shapes=states,
            high={"token": setup.words},
        )
        decoder = Cell(
            "decoder",
            made["decoder"],
            ("token", "h", "c"),
            batch_sizes=batch_sizes(setup.decoder_batch),
            high={"token": setup.words},
        )

        def translate(graph: Graph, tokens: np.ndarray, steps: int) -> Any:
            read = graph.chain(encoder, len(tokens), each={"token": tokens}, carry={"h": "h", "c": "c"}).node(-1)
            said = graph.grow(
                decoder,
                steps,
                carry={"token": "token", "h": "h", "c": "c"},
                first={"token": GO, "h": read["h"], "c": read["c"]},
            )
            return said["token"]

        return CellModel("seq2seq", [encoder, decoder], translate, {"tokens": np.array([1, 2]), "steps": 2})
    leaf = Cell("leaf", made["leaf"], ("h", "c"), priority=1, batch_sizes=sizes)  # see `cellar.cells.tree_lstm`
    inner = Cell("inner", made["inner"], ("h", "c"), batch_sizes=sizes)

    def compose(graph: Graph, tokens: np.ndarray, children: np.ndarray) -> Any:
        return graph.tree(leaf, inner, leaves={"token": tokens}, children=children, wires=WIRES).node(-1)["h"]

    example = {"tokens": np.array([1, 2]), "children": np.array([[0, 1]])}
    return CellModel("treelstm", [leaf, inner], compose, example)


def library_lstm(cell: nn.Module, setup: Setup) -> nn.LSTM:
    """`torch.nn.LSTM` with the weights of one of our cells."""
    assert isinstance(cell, LSTMStack)
    found = nn.LSTM(cell.input_size, cell.hidden_size, cell.num_layers)
    found.load_state_dict({name: value for name, value in cell.state_dict().items() if "_l" in name})
    found.to(setup.torch_device, setup.torch_dtype).eval()
    found.flatten_parameters()
    return found


def sentence_fields(data: Sentences, setup: Setup) -> list[Fields]:
    """The requests of a pool of sentences."""
    if setup.model == "lstm":
        return [{"tokens": data.words(k)} for k in range(len(data))]
    return [{"tokens": data.words(k), "steps": data.target(k)} for k in range(len(data))]


def tree_fields(trees: list[Tree]) -> list[Fields]:
    """The requests of a pool of trees, leaves numbered first, words by a vocabulary of the pool."""
    number = vocabulary(trees)
    return [_tree_fields(tree, number) for tree in trees]


def _tree_fields(tree: Tree, number: dict[str, int]) -> Fields:
    leaves = [k for k, word in enumerate(tree.words) if word is not None]
    inner = [k for k, word in enumerate(tree.words) if word is None]
    place = {k: n for n, k in enumerate(leaves + inner)}
    children = np.array([[place[child] for child in tree.children[k]] for k in inner], np.int64).reshape(-1, 2)
    tokens = np.array([number[word] for word in tree.words if word is not None], np.int64)
    return {"tokens": tokens, "children": children}
