"""Models over one sequence of tokens: a classifier, and scores of a text. One that writes on is in `seq2seq.py`.

Each takes modules and makes the cells; LSTM and GRU differ only in the states that they carry.
"""

from __future__ import annotations

from collections.abc import Sequence

from cellar.cells.cell import DEFAULT_BATCH_SIZES, Cell
from cellar.cells.graph import Graph
from cellar.cells.gru import GRUStack, TokenGRUCell
from cellar.cells.heads import ClassifierHead, ScoreHead
from cellar.cells.lstm import LSTMStack, TokenLSTMCell
from cellar.cells.model import CellModel
from cellar.cells.refs import Nodes
from cellar.core.errors import RequestError

Recurrent = TokenLSTMCell | TokenGRUCell


def classifier(
    module: Recurrent,
    head: ClassifierHead,
    *,
    name: str = "classifier",
    batch_sizes: Sequence[int] = DEFAULT_BATCH_SIZES,
) -> CellModel:
    """{tokens} -> {label, logits}: the head's answer to the state after the last token."""
    step, last = step_cell("step", module, batch_sizes), Cell("head", head, ("label", "logits"), priority=1)

    def unfold(graph: Graph, tokens: list[int]) -> dict[str, object]:
        answer = graph.call(last, h=read(graph, step, tokens).node(-1)["h"])
        return {"label": answer["label"], "logits": answer["logits"]}

    return CellModel(name, [step, last], unfold, {"tokens": [0, 0]})


def scorer(
    module: Recurrent,
    head: ScoreHead,
    *,
    name: str = "scorer",
    batch_sizes: Sequence[int] = DEFAULT_BATCH_SIZES,
) -> CellModel:
    """{tokens} -> {logprobs}: of every token but the first, given those before it."""
    step = step_cell("step", module, batch_sizes)
    score = Cell("score", head, ("logprob",), priority=1, high={"token": head.out_features})

    def unfold(graph: Graph, tokens: list[int]) -> dict[str, object]:
        if len(tokens) < 2:
            raise RequestError(
                "tokens has fewer than two tokens, so that there is nothing to score; give more.", "tokens"
            )
        steps = read(graph, step, tokens[:-1])
        scores = graph.map(score, len(steps), each={"h": steps["h"], "token": tokens[1:]})
        return {"logprobs": scores["logprob"]}

    return CellModel(name, [step, score], unfold, {"tokens": [0, 0, 0]})


def step_cell(name: str, module: Recurrent, batch_sizes: Sequence[int], priority: int = 0) -> Cell:
    """The cell of one step over tokens; its states are inputs and outputs of the same names."""
    states = state_shapes(module)
    return Cell(
        name,
        module,
        tuple(states),
        priority=priority,
        batch_sizes=tuple(batch_sizes),
        shapes=states,
        high={"token": module.embedding.num_embeddings},
    )


def read(graph: Graph, step: Cell, tokens: Sequence[int]) -> Nodes:
    """A chain over tokens, from states of zeros. Raises RequestError for no tokens."""
    if not len(tokens):
        raise RequestError("there are no tokens; give at least one.")
    return graph.chain(step, len(tokens), each={"token": tokens}, carry={state: state for state in step.outputs})


def state_shapes(module: LSTMStack | GRUStack) -> dict[str, tuple[int, ...]]:
    """The states of a stack by name, without the batch."""
    shape = (module.hidden_size,) if module.num_layers == 1 else (module.num_layers, module.hidden_size)
    return dict.fromkeys(("h",) if isinstance(module, GRUStack) else ("h", "c"), shape)
