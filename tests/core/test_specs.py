from __future__ import annotations

import numpy as np

from cellar.core.messages import Spans
from cellar.core.specs import KVGroup, KVSpec, LayerSpec, ModelSpec, TensorSpec


def small_model(tied: bool) -> ModelSpec:
    table = TensorSpec("embed", (100, 8), "bfloat16", ("vocab", "embed"), ("e",))
    head = TensorSpec("lm_head", (100, 8), "bfloat16", ("vocab", "embed"), ("e",) if tied else ("h",))
    layers = tuple(
        LayerSpec(
            j,
            (
                TensorSpec("norm", (8,), "bfloat16", ("embed",), (f"n{j}",)),
                TensorSpec("qkv", (16, 8), "bfloat16", ("heads", "embed"), (f"q{j}", f"k{j}", f"v{j}")),
            ),
            num_heads=2,
            num_kv_heads=1,
            head_dim=4,
            window=None if j == 0 else 16,
        )
        for j in range(2)
    )
    kv = KVSpec((KVGroup("full", "full", (0, 1), 1, 4, "bfloat16"),))
    return ModelSpec("test", "bfloat16", 8, 2, 2, 1, 4, 16, 100, 64, (table,), layers, (head,), kv, tied_head=tied)


def test_sizes_by_hand() -> None:
    untied, tied = small_model(False), small_model(True)
    assert untied.num_parameters() == 800 + 2 * (8 + 128) + 800
    assert tied.num_parameters() == 800 + 2 * (8 + 128)
    assert tied.nbytes() == 2 * tied.num_parameters()
    assert tied.kv.nbytes_per_token() == 2 * 2 * 1 * 4 * 2
    assert tied.kv.chunk_nbytes() == 32 * 32
    assert len(list(untied.tensors())) == 6


def test_flops_by_hand() -> None:
    model = small_model(False)
    # Matrices: 128 multiply-adds a token and layer; attention: QK^T and PV over the context, 16 in the windowed layer.
    expected = 3 * (2 * 128 + 4 * 2 * 4 * 50) + 3 * (2 * 128 + 4 * 2 * 4 * 16) + 2 * 800
    assert model.flops(num_tokens=3, context=50, num_sampled=1) == expected


def test_a_step_reads_weights_and_cache_once() -> None:
    untied, tied = small_model(False), small_model(True)
    assert untied.step_nbytes(10) == untied.nbytes() - 1600 + 10 * 32
    assert tied.step_nbytes(0) == tied.nbytes()


def test_spans_count_their_tokens() -> None:
    row, start, stop = (np.array(x, np.int32) for x in ([0, 0, 3], [0, 64, 7], [32, 70, 8]))
    spans = Spans(row, start, stop, np.zeros(3, np.int32), np.zeros(3, np.int32))
    assert (len(spans), spans.num_tokens) == (3, 39)
