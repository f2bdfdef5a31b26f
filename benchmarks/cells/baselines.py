"""The baselines of one setup: padding by bucket width, with our cells or the library's LSTM, and the ideal line."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.cells.graph_batching import Executor, GraphBatching
from benchmarks.cells.ideal import FixedChain, FixedTree
from benchmarks.cells.models import library_lstm, modules
from benchmarks.cells.padded import ChainExecutor, LibraryChain, LibraryTranslate, TranslateExecutor
from benchmarks.cells.padding import Buckets, Fixed
from benchmarks.cells.sentences import Sentences
from benchmarks.cells.setup import GO, Setup
from cellar.core.errors import ConfigError
from cellar.ops.recurrent.rows import RowsFunction, RowsModule


def padding(setup: Setup, width: int) -> GraphBatching:
    """Padding with bucketing, computed by our cells. Raises ConfigError for trees."""
    _check_padding(setup)
    data = setup.sentences()
    return GraphBatching(
        f"padding, width {width}",
        Buckets(width, setup.baseline_batch),
        executor(setup, data),
        data.length,
        setup.new_clock(),
    )


def library(setup: Setup, width: int) -> GraphBatching:
    """Padding with bucketing, computed by `torch.nn.LSTM`. Raises ConfigError for trees."""
    _check_padding(setup)
    data = setup.sentences()
    made = modules(setup)
    device = setup.torch_device
    run: Executor
    if setup.model == "lstm":
        run = LibraryChain(_child(made["lstm"], "embedding"), library_lstm(made["lstm"], setup), data, device)
    else:
        encoder, decoder = made["encoder"], made["decoder"]
        output = decoder.get_submodule("output")
        assert isinstance(output, nn.Linear)
        run = LibraryTranslate(
            _child(encoder, "embedding"),
            library_lstm(encoder, setup),
            _child(decoder, "embedding"),
            library_lstm(decoder, setup),
            output,
            GO,
            data,
            device,
        )
    return GraphBatching(
        f"nn.LSTM, width {width}", Buckets(width, setup.baseline_batch), run, data.length, setup.new_clock()
    )


def ideal(setup: Setup) -> GraphBatching:
    """The hard-coded graph of requests that are all alike (figures 2.11, 2.15). Raises ConfigError for other data."""
    length = setup.fixed_length
    if length is None:
        raise ConfigError("the ideal line is for requests that are all alike; use data such as fixed-24 or fixed-16.")
    made = modules(setup)
    device, batch = setup.torch_device, setup.baseline_batch
    if setup.model == "treelstm":
        leaf, inner = (_rows(made[name], device) for name in ("leaf", "inner"))
        (tree,) = setup.trees()
        run: Executor = FixedTree(leaf, inner, tree, setup.hidden, batch, setup.torch_dtype, device)
        return GraphBatching("ideal", Fixed(length, batch), run, lambda request: length, setup.new_clock())
    data = setup.sentences()
    if setup.model == "lstm":
        run = FixedChain(_rows(made["lstm"], device), setup.hidden, batch, setup.torch_dtype, data, device)
    else:
        run = executor(setup, data)
    return GraphBatching("ideal", Fixed(length, batch), run, data.length, setup.new_clock())


def executor(setup: Setup, data: Sentences) -> Executor:
    """Padded batches through our cells."""
    made = modules(setup)
    device, dtype = setup.torch_device, setup.torch_dtype
    if setup.model == "lstm":
        return ChainExecutor(_rows(made["lstm"], device), setup.hidden, dtype, data, device)
    encoder, decoder = (_rows(made[name], device) for name in ("encoder", "decoder"))
    return TranslateExecutor(encoder, decoder, GO, setup.hidden, dtype, data, device)


def _check_padding(setup: Setup) -> None:
    if setup.model == "treelstm":
        raise ConfigError("trees cannot be padded; compare with merging.")


def _rows(module: nn.Module, device: torch.device) -> RowsFunction:
    assert isinstance(module, RowsModule)
    return module.on_rows(device)


def _child(module: nn.Module, name: str) -> nn.Embedding:
    found = module.get_submodule(name)
    assert isinstance(found, nn.Embedding)
    return found
