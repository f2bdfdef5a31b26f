"""Seq2Seq (Sutskever, Vinyals, Le 2014): an encoder and a decoder cell, the decoder fed with its own last word.

Encoder: names of `torch.nn.LSTM` and `embedding.weight`. Decoder: the same, and `output.weight` [vocab, hidden],
`output.bias`; the best word is chosen on the device. Decoder cells have batch sizes of their own: their product with
the vocabulary is most of the work (BatchMaker §2.7.4).

Cells that read go before cells that write, unlike in BatchMaker. Where a worker has one call at a time, none is running
when the next is chosen, so that priority alone decides: a decoder that goes first runs with the one or two requests
that have come so far until they end, while all others wait to be read; a reader that goes first costs little and fills
the decoder's batches (docs/log/cells.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from cellar.cells.cell import DEFAULT_BATCH_SIZES, Cell
from cellar.cells.graph import Graph
from cellar.cells.heads import Projection, best_token, top
from cellar.cells.lstm import LSTMRows, LSTMStack, TokenLSTMCell
from cellar.cells.model import CellModel
from cellar.cells.refs import GrownOutput
from cellar.cells.sequence import read, state_shapes, step_cell
from cellar.core.errors import RequestError
from cellar.ops.recurrent.rows import Rows, RowsFunction, RowsOutput, StepsFunction, landing, put, returned

_CARRIED = {0: 0, 1: 1, 2: 2}
"""Of inputs and outputs (token, h, c)."""

_MOST_STEPS_BATCH = 16
"""Larger batches take a millisecond and more a step, beside which what several steps in one call save is little."""


class DecoderCell(LSTMStack):
    """One step of a decoder: (token, h, c) -> (token, h, c); the new token is the best one, int64 []."""

    def __init__(
        self, vocab_size: int, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True
    ) -> None:
        super().__init__(input_size, hidden_size, num_layers, bias)
        self.embedding = nn.Embedding(vocab_size, input_size)
        self.output = nn.Linear(hidden_size, vocab_size)

    def forward(self, token: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """token: [b] int64; h, c as in the stack."""
        h, c = super().forward(self.embedding(token), h, c)
        return self.output(top(h)).argmax(1), h, c

    def encoder(self) -> TokenLSTMCell:
        """The cell without the output: (token, h, c) -> (h, c), of the same parameters."""
        cell = TokenLSTMCell(
            self.embedding.num_embeddings, self.input_size, self.hidden_size, self.num_layers, self.has_bias
        )
        cell.embedding = self.embedding
        for name in list(cell._parameters):
            cell.register_parameter(name, self._parameters[name])
        return cell

    def on_rows(self, device: torch.device) -> RowsFunction:
        """The step over rows."""
        rows = LSTMRows(self, device)
        words = self.embedding.weight.detach().to(device)
        project = Projection(self.output, device)

        def step(sources: Sequence[Rows], targets: Sequence[Rows | None]) -> RowsOutput:
            token, h, c = sources
            landed = landing(targets[1], h, h.index), landing(targets[2], c, c.index)
            finite, last = rows.step(Rows(words, token.gather()), h, c, *landed)
            best, sound = best_token(project(last.gather()))
            return RowsOutput(finite & sound, (put(targets[0], best), *returned(targets[1:], landed)))

        layer = rows.single
        if layer is None:
            return step

        def run(sources: Sequence[Rows], num_steps: int, targets: Sequence[Rows | None]) -> RowsOutput:
            token, state, memory = (source.gather() for source in sources)
            tokens, sounds = [], []
            for _ in range(num_steps):
                state, memory, finite = layer.step(words.index_select(0, token), state, memory)
                token, sound = best_token(project(state))
                tokens.append(token)
                sounds.append(finite & sound)
            if targets[0] is not None:
                targets[0].scatter(token)
            return RowsOutput(torch.cat(sounds), (torch.cat(tokens), put(targets[1], state), put(targets[2], memory)))

        return StepsFunction(step, _CARRIED, run, every=frozenset({0}), most=_MOST_STEPS_BATCH)


def translator(
    encoder: TokenLSTMCell,
    decoder: DecoderCell,
    start: int,
    stop: int,
    *,
    max_tokens: int = 256,
    name: str = "translator",
    encoder_batch_sizes: Sequence[int] = DEFAULT_BATCH_SIZES,
    decoder_batch_sizes: Sequence[int] = DEFAULT_BATCH_SIZES[:-1],
) -> CellModel:
    """{tokens, max_tokens} -> {tokens}: a decoder that begins with `start` and the encoder's states, until `stop`."""
    reading = step_cell("encoder", encoder, encoder_batch_sizes, priority=1)
    writing = writing_cell("decoder", decoder, decoder_batch_sizes)
    most = max_tokens

    def unfold(graph: Graph, tokens: list[int], max_tokens: int = max_tokens) -> dict[str, object]:
        last = read(graph, reading, tokens).node(-1)
        first = {"token": start, "h": last["h"], "c": last["c"]}
        return {"tokens": write(graph, writing, first, max_tokens, most, stop)}

    return CellModel(name, [reading, writing], unfold, {"tokens": [0, 0], "max_tokens": 2})


def language_model(
    decoder: DecoderCell,
    stop: int,
    *,
    max_tokens: int = 256,
    name: str = "language_model",
    prompt_batch_sizes: Sequence[int] = DEFAULT_BATCH_SIZES,
    batch_sizes: Sequence[int] = DEFAULT_BATCH_SIZES[:-1],
) -> CellModel:
    """{tokens, max_tokens} -> {tokens}: the most likely next token, again and again, until `stop` or the limit.

    All tokens given but the last one run in a cell without the product with the vocabulary; both have the same weights.
    """
    reading = step_cell("read", decoder.encoder(), prompt_batch_sizes, priority=1)
    writing = writing_cell("write", decoder, batch_sizes)
    most = max_tokens

    def unfold(graph: Graph, tokens: list[int], max_tokens: int = max_tokens) -> dict[str, object]:
        if not tokens:
            raise RequestError("there are no tokens; give at least one.", "tokens")
        first: dict[str, object] = {"token": tokens[-1]}
        if len(tokens) > 1:
            last = read(graph, reading, tokens[:-1]).node(-1)
            first |= {"h": last["h"], "c": last["c"]}
        return {"tokens": write(graph, writing, first, max_tokens, most, stop)}

    return CellModel(name, [reading, writing], unfold, {"tokens": [0, 0], "max_tokens": 2})


def writing_cell(name: str, decoder: DecoderCell, batch_sizes: Sequence[int]) -> Cell:
    """The cell of one step of a decoder; the cells that read go before it."""
    return Cell(
        name,
        decoder,
        ("token", "h", "c"),
        batch_sizes=tuple(batch_sizes),
        shapes=state_shapes(decoder),
        high={"token": decoder.embedding.num_embeddings},
    )


def write(graph: Graph, cell: Cell, first: Mapping[str, object], limit: int, most: int, stop: int) -> GrownOutput:
    """Feed a decoder with its own token until it is `stop`, at most `limit` times; a limit above `most` is refused."""
    if not 0 < limit <= most:
        raise RequestError(f"max_tokens is {limit}, but this model writes 1 to {most} tokens; change it.", "max_tokens")
    carry = {"token": "token", "h": "h", "c": "c"}
    return graph.grow(cell, limit, carry=carry, first=first, stop=("token", stop))["token"]
