"""What is measured: model, sizes, data and device, and from these the systems."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from benchmarks.cells.clock import Clock, WallClock, WorkClock
from benchmarks.cells.lengths import lengths_from, wmt_like_pairs
from benchmarks.cells.sentences import Sentences
from benchmarks.cells.trees import Tree, complete, read_trees, treebank_like
from cellar.core.dtypes import dtype_name
from cellar.core.errors import ConfigError
from cellar.runtime.cells.graphs import MOST_TASKS
from cellar.runtime.device import resolve_device

ModelName = Literal["lstm", "seq2seq", "treelstm"]
MODELS: tuple[ModelName, ...] = ("lstm", "seq2seq", "treelstm")
WIDTHS = (1, 10, 40)
"""Bucket widths of figure 2.8; 10 is the paper's choice."""

GO, FIXED_LENGTH, FIXED_LEAVES = 1, 24, 16


@dataclass(frozen=True)
class Setup:
    """One benchmark. What is None depends on the device: see `resolved`.

    data         lstm: wmt, wmt-50, fixed-24 or a WikiText file; seq2seq: wmt, wmt-50, fixed-24;
                 treelstm: treebank (made up), fixed-16 (complete trees of 16 leaves) or a file of bracketed trees
    clock        wall; or work: one thread per system, its CPU time, waits skipped (CPU only)
    pace         of the undisturbed processor (`clock.Pace`), by which a clock of work goes; None: as it is
    ahead        unfold the pool's requests before the clock starts
    max_batch    largest batch of every system; decoder_batch: of decoder cells, and of seq2seq's baselines
    tree_batch   most nodes of a task of our trees' cells; `max_batch` is the requests of a merged graph there
    max_tasks    tasks of a call; None: as the runtime asks for (`CellConfig`)
    answer_tasks of how many tasks an accelerator gives the results at once (`LocalCellRuntime`)
    """

    model: ModelName = "lstm"
    hidden: int = 256
    vocab: int | None = None
    data: str | None = None
    device: str = "auto"
    dtype: str = "float32"
    threads: int | None = None
    max_batch: int | None = None
    decoder_batch: int | None = None
    tree_batch: int | None = None
    max_tasks: int | None = None
    run_ahead: int | None = None
    answer_tasks: int = MOST_TASKS
    ahead: bool = False
    clock: Literal["wall", "work"] = "wall"
    pace: float | None = None
    pool: int = 10_000
    seed: int = 0

    def resolved(self) -> Setup:
        """A copy in which everything is decided. Raises ConfigError, DeviceError."""
        if self.model not in MODELS:
            raise ConfigError(f"model is {self.model!r}; use {', '.join(MODELS)}.")
        for name in ("hidden", "pool", "max_tasks", "answer_tasks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1.")
        device = resolve_device(self.device)
        on_cpu = device.type == "cpu"
        if self.clock not in ("wall", "work") or (self.clock == "work" and not on_cpu):
            raise ConfigError(f"clock is {self.clock!r}; use wall, or on a CPU work.")
        max_batch = self.max_batch or (64 if on_cpu else 64 if self.model == "treelstm" else 512)
        return replace(
            self,
            # The paper has 30,000 words at h = 1024; this keeps the share of the projection.
            vocab=self.vocab or max(1000, 30_000 * self.hidden // 1024),
            run_ahead=self.run_ahead or (1 if on_cpu else 2),
            data=self.data or ("treebank" if self.model == "treelstm" else "wmt"),
            device=str(device),
            threads=1 if self.clock == "work" else self.threads,
            dtype=dtype_name(self.dtype),
            max_batch=max_batch,
            decoder_batch=self.decoder_batch or (max_batch if on_cpu else max_batch // 2),
            tree_batch=self.tree_batch or (4 if on_cpu else 8) * max_batch,
        )

    def new_clock(self) -> Clock:
        """The clock of one system."""
        return WorkClock(pace=self.pace) if self.clock == "work" else WallClock()

    @property
    def torch_device(self) -> torch.device:
        """The device of a resolved setup."""
        return torch.device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of weights and states."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def words(self) -> int:
        """Vocabulary of a resolved setup."""
        assert self.vocab is not None
        return self.vocab

    @property
    def source(self) -> str:
        """Data of a resolved setup."""
        assert self.data is not None
        return self.data

    @property
    def baseline_batch(self) -> int:
        """One batch size for all operators of a graph: the decoder's, if there is one."""
        found = self.decoder_batch if self.model == "seq2seq" else self.max_batch
        assert found is not None
        return found

    def sentences(self) -> Sentences:
        """The pool of sentences, with targets for seq2seq."""
        rng = np.random.default_rng(self.seed)
        if self.model == "lstm":
            return Sentences.random(lengths_from(self.source, self.pool, rng), self.words, rng)
        kind, _, number = self.source.partition("-")
        if kind == "fixed":
            both = lengths_from(self.source, self.pool, rng)
            return Sentences.random(both, self.words, rng, both)
        if kind != "wmt" or (number and not number.isdigit()):
            raise ConfigError(f"data is {self.source!r}; seq2seq takes wmt, wmt-50 or fixed-24.")
        source, target = wmt_like_pairs(self.pool, rng, int(number or 330))
        return Sentences.random(source, self.words, rng, target)

    def trees(self) -> list[Tree]:
        """The pool of binary trees."""
        if self.source.startswith("fixed-"):
            return [complete(int(self.source.removeprefix("fixed-")))]
        if self.source == "treebank":
            return treebank_like(self.pool, np.random.default_rng(self.seed), self.words)
        return [tree for tree in read_trees(Path(self.source)) if tree.binary]

    @property
    def fixed_length(self) -> int | None:
        """Words, or leaves, of every request if they are all alike."""
        kind, _, number = self.source.partition("-")
        if kind != "fixed":
            return None
        return int(number) if number else FIXED_LEAVES if self.model == "treelstm" else FIXED_LENGTH
