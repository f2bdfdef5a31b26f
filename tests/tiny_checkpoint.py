"""A tiny Llama with random weights and a real (tiny) tokenizer, as a directory in Hugging Face's layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from cellar.models.registry import open_model

TOKENIZER = Path(__file__).parent / "data" / "tokenizers" / "gpt-tiny"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 420,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def write_checkpoint(directory: Path, **changes: Any) -> Path:
    """Weights are a function of the config alone."""
    directory.mkdir(parents=True, exist_ok=True)
    config = CONFIG | changes
    (directory / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for tensor in open_model(config, "float32").spec.tensors():
        rows = tensor.parts or (tensor.shape[0] // len(tensor.stored),) * len(tensor.stored)
        for name, count in zip(tensor.stored, rows, strict=True):
            scale = 1.4 * tensor.shape[-1] ** -0.5 if len(tensor.shape) == 2 else 0.2
            made = torch.randn(count, *tensor.shape[1:], generator=generator) * scale
            tensors[name] = made + 1 if tensor.name.endswith("norm") else made
    save_file(tensors, directory / "model.safetensors")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / file, directory / file)
    return directory
