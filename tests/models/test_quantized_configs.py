"""Quantization configs that are wrong in any way: refused in a sentence, or the matrices are read as they are meant.

A checkpoint stays as it was written while values of its config that a tool could have written change, one to three at a
time. What then loads must have the same matrices: fluent garbage is what nobody notices.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cellar.core.errors import CheckpointError
from cellar.models.loader import LoadedWeights
from tests.models.test_quantized import CASES, CONFIG, opened, written

HADAMARD = {"config_groups": {"u": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "input"}]}}}
VALUES: Mapping[str, tuple[Any, ...]] = {
    "quant_method": ("awq", "gptq", "fp8", "compressed-tensors", "mxfp4"),
    "bits": (2, 3, 4, 4.0, 8, 8.0, "4", None),
    "group_size": (-1, 0, 16, 32, 64, 64.0, 128, "128", None),
    "zero_point": (True, False, None),
    "version": ("gemm", "GEMM", "gemv", None),
    "desc_act": (True, False, None, "yes"),
    "sym": (True, False, None),
    "checkpoint_format": ("gptq", "gptq_v2", "marlin", None),
    "modules_to_not_convert": ([], ["lm_head"], ["mlp"], ["q_proj"], ["nothing"], None),
    "lm_head": (True, False),
    "ignored_layers": (["down_proj"], []),
    "ignore": ([], ["Linear"], ["re:.*mlp.*"], ["re:nothing"], ["model.layers.0.mlp.up_proj"]),
    "weight_block_size": (None, [128, 128], [128.0, 128.0], [64, 64], 128),
    "activation_scheme": ("static", "dynamic", None),
    "fmt": ("e4m3", "e5m2"),
    "sparsity_config": ({}, {"format": "dense"}, {"format": "sparse-24-bitmask"}),
    "transform_config": (None, {}, HADAMARD),
    "config_groups": ({}, None),
    "format": ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense", "marlin-24"),
}
# Of the one group that a compressed-tensors config has, and of its weights.
GROUP: Mapping[str, tuple[Any, ...]] = {
    "targets": (["Linear"], ["re:.*mlp.*"], ["nothing"], [], ["LlamaAttention"], ["Linear", "re:.*proj"]),
    "format": VALUES["format"],
    "weights": (None, {}),
    "input_activations": (
        {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token", "symmetric": True},
        {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor"},
        {"num_bits": 8, "type": "int", "dynamic": False, "strategy": "token"},
        [],
    ),
}
WEIGHTS: Mapping[str, tuple[Any, ...]] = {
    "num_bits": (3, 4, 8, 8.0, None),
    "type": ("int", "float", "Int"),
    "strategy": ("group", "channel", "tensor", "block", "token", None),
    "symmetric": (True, False, None),
    "dynamic": (True, False, "local"),
    "group_size": VALUES["group_size"],
    "actorder": ("group", "weight", "static", "dynamic", True, False, None),
    "block_structure": ([128, 128], "128x128", None),
}
PLACES = [("", VALUES), ("group", GROUP), ("weights", WEIGHTS)]
changes = st.sampled_from([(where, name, value) for where, names in PLACES for name in names for value in names[name]])


def changed(config: Mapping[str, Any], wishes: list[tuple[str, str, Any]]) -> dict[str, Any]:
    """The config with values in their places; those for places that it does not have are left out."""
    found: dict[str, Any] = copy.deepcopy(dict(config))
    group = (found.get("config_groups") or {}).get("group_0")
    for where, name, value in wishes:
        place = {"": found, "group": group, "weights": group and group.get("weights")}[where]
        if isinstance(place, dict):
            place[name] = copy.deepcopy(value)
    return found


def matrices(weights: LoadedWeights) -> dict[str, Tensor]:
    return {
        f"{j}.{name}": weight if isinstance(weight, Tensor) else weight.dense()
        for j, layer in enumerate(weights.layers)
        for name, weight in layer.items()
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By case: its folder, and the matrices that it stands for. Made once, since only configs change."""

    @cache
    def made(name: str) -> tuple[Path, dict[str, Tensor]]:
        folder = tmp_path_factory.mktemp("case")
        return folder, matrices(opened(written(folder, *CASES[name]))[1])

    return made


def is_unseen(name: str, config: Mapping[str, Any]) -> bool:
    """The one lie that no tensor shows: the other convention of zero points, of codes that are not symmetric."""
    first = CASES[name][0].get("checkpoint_format") or "gptq"
    other = first != (config.get("checkpoint_format") or "gptq")
    return config.get("quant_method") == "gptq" and other and config.get("sym") is not True


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(wishes=st.lists(changes, min_size=1, max_size=3))
def test_a_wrong_config_is_refused_or_does_no_harm(name: str, folders: Any, wishes: list[tuple[str, str, Any]]) -> None:
    folder, wanted = folders(name)
    config = changed(CASES[name][0], wishes)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": config}))
    try:
        found = matrices(opened(folder)[1])
    except CheckpointError as error:
        said = str(error)
        assert said.endswith("."), said
        assert "\n" not in said
        return
    if is_unseen(name, config):
        return
    for key, matrix in wanted.items():
        assert (found[key] - matrix).abs().max() <= 1e-6 * matrix.abs().max(), (key, config)
