"""`cellar inspect` of quantized checkpoints: each format by name, with its bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cellar.cli.main import build
from cellar.models.registry import shipped_config

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": True, "desc_act": False}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
MATRIX = {"quant_method": "fp8", "activation_scheme": "dynamic"}
LAYERS = 32 * 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336)
"""Numbers of Llama-3-8B's layers in matrices."""


def inspect(*arguments: str) -> str:
    result = CliRunner().invoke(build(), ["inspect", *arguments, "--dtype", "bfloat16"])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(
    ("quantization", "name", "nbytes"),
    [
        # Beside the codes each group, or row, has a scale and a zero point.
        (AWQ, "int4 in groups of 128", LAYERS // 2 + 3 * LAYERS // 128),
        (GPTQ, "int8 by row", LAYERS + 5 * 32 * (6144 + 4096 + 2 * 14336 + 4096)),
        (BLOCKS, "fp8 in blocks of 128 x 128 with activations in fp8", LAYERS + 4 * LAYERS // 128**2),
        # A scale for each of seven stored matrices.
        (MATRIX, "fp8 by matrix with activations in fp8", LAYERS + 4 * 7 * 32),
        ({"quant_method": "mxfp4"}, "mxfp4 in groups of 32", LAYERS // 2 + LAYERS // 32),
    ],
    ids=["awq", "gptq", "fp8 blocks", "fp8", "mxfp4"],
)
def test_the_format_of_a_quantized_checkpoint_is_shown(
    quantization: dict[str, Any], name: str, nbytes: int, tmp_path: Path
) -> None:
    config = shipped_config("llama-3-8b")
    assert config is not None
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    found = json.loads(inspect(str(tmp_path), "--json"))
    assert found["weight_formats"][name] == nbytes
    assert list(found["weight_formats"]) == [name, "bfloat16"]
    assert sum(found["weight_formats"].values()) == found["weight_nbytes"]
    assert found["weight_nbytes"] == sum(share["nbytes"] for share in found["shares"])
    shown = " ".join(inspect(str(tmp_path)).replace("│", " ").split())
    assert f"GiB {name}, 1.96 GiB bfloat16; computed in bfloat16" in shown


def test_a_plain_checkpoint_has_one_format() -> None:
    found = json.loads(inspect("llama-3-8b", "--json"))
    assert found["weight_formats"] == {"bfloat16": found["weight_nbytes"]}
    assert "15 GiB in bfloat16" in inspect("llama-3-8b")
