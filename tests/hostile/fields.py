"""Every field of a model's JSON files with every value that it should not have: what comes of it is a model or a
sentence. `python -m tests.hostile.fields` tries all of them and prints what did neither.
"""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

from cellar.core.errors import CellarError
from cellar.models.checkpoint import Checkpoint
from cellar.models.registry import open_model, read_config
from cellar.text.chat import ChatTemplate
from cellar.text.generation import read_generation_config
from cellar.text.tokenizer import Tokenizer
from tests.tiny_checkpoint import TOKENIZER

WRONG: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 7, 2**31, 2**63, -(2**63), 10**30, 10**400, 0.0, -0.5, 1.5, 1e308),
    *(
        float("nan"),
        float("inf"),
        float("-inf"),
        "",
        "x",
        "0",
        "1e3",
        "\ud800",
        "x" * 5000,
        [],
        [0],
        [-1],
        [[]],
        [None],
    ),
    *({}, {"": 0}, {"a": {"a": {}}}, [1e308, "x"], {"0": [0]}, "../../etc/passwd", ["..", 5], [{}] * 3),
)
"""Negative, zero, huge, no number, of another kind, nested."""

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "vocab_size": 320,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "eos_token_id": [1, 2],
    "bos_token_id": 1,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1}
LONG = {
    "rope_type": "longrope",
    "factor": 2.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 64,
}
OPT: dict[str, Any] = {
    "model_type": "opt",
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "ffn_dim": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 320,
    "max_position_embeddings": 128,
    "do_layer_norm_before": True,
    "enable_bias": True,
    "activation_function": "relu",
    "layer_norm_elementwise_affine": True,
}
CHATGLM: dict[str, Any] = {
    "model_type": "chatglm",
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "kv_channels": 8,
    "num_layers": 2,
    "padded_vocab_size": 320,
    "seq_length": 128,
    "layernorm_epsilon": 1e-5,
    "rmsnorm": True,
    "add_qkv_bias": True,
    "add_bias_linear": False,
    "post_layer_norm": True,
    "rope_ratio": 1.0,
}
SCHEMES: tuple[dict[str, Any], ...] = (
    {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "checkpoint_format": "gptq"},
    {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]},
    {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": 32,
                    "actorder": None,
                },
            }
        },
    },
    {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    {"quant_method": "bitsandbytes", "load_in_8bit": True},
)
CONFIGS: tuple[dict[str, Any], ...] = (
    LLAMA,
    *({**LLAMA, "model_type": kind, "sliding_window": 64} for kind in ("mistral", "qwen2", "qwen3")),
    *({**LLAMA, "rope_scaling": scaling} for scaling in (YARN, LONG, {"type": "linear", "factor": 2.0})),
    OPT,
    CHATGLM,
    *({**LLAMA, "hidden_size": 64, "quantization_config": scheme} for scheme in SCHEMES),
)
GENERATION: dict[str, Any] = {
    "eos_token_id": [1, 2],
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "max_new_tokens": 10,
    "do_sample": True,
}
ADDED = {"content": "<x>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
TOKENIZER_CONFIG: dict[str, Any] = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "special": True},
    "additional_special_tokens": ["<x>"],
    "added_tokens_decoder": {"5": ADDED},
    "add_bos_token": True,
    "add_eos_token": False,
    "model_max_length": 128,
    "chat_template": [{"name": "default", "template": "{{ messages }}"}],
}
HEADER: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "b": {"dtype": "F16", "shape": [4], "data_offsets": [16, 24]},
}
INDEX: dict[str, Any] = {
    "metadata": {"total_size": 24},
    "weight_map": {"a": "part.safetensors", "b": "part.safetensors"},
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to all that is in a value."""
    if path:
        yield path
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in members:
        yield from places(member, (*path, key))


def changed(value: Any, path: tuple[Any, ...], to: Any) -> Any:
    """The value with another at one place; KeyError as `to`: with nothing there."""
    made = deepcopy(value)
    at = made
    for part in path[:-1]:
        at = at[part]
    if to is KeyError:
        del at[path[-1]]
    else:
        at[path[-1]] = to
    return made


def variants(value: Any) -> Iterator[tuple[str, Any]]:
    """Everything with one wrong value, and each key missing; with a name."""
    for path in places(value):
        for to in (*WRONG, KeyError):
            yield f"{'.'.join(map(str, path))} = {str(to)[:40]}", changed(value, path, to)


def write(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(json.dumps(value))


def of_config(folder: Path, value: Any) -> None:
    write(folder, "config.json", value)
    open_model(read_config(folder), "float32")


def of_generation(folder: Path, value: Any) -> None:
    write(folder, "config.json", LLAMA)
    write(folder, "generation_config.json", value)
    open_model(read_config(folder), "float32")
    read_generation_config("auto", folder)


def of_tokenizer(folder: Path, value: Any) -> None:
    shutil.copy(TOKENIZER / "tokenizer.json", folder)
    write(folder, "tokenizer_config.json", value)
    tokenizer = Tokenizer.load(folder)
    tokenizer.decode(tokenizer.encode("a house"))
    ChatTemplate.load(folder, tokenizer.special_tokens)


def of_header(folder: Path, value: Any, name: str = "model.safetensors") -> None:
    head = json.dumps(value).encode()
    (folder / name).write_bytes(struct.pack("<Q", len(head)) + head + bytes(24))
    if name == "model.safetensors":
        read_all(folder)


def read_all(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    for name in checkpoint.tensors:
        for _ in checkpoint.read(name):
            pass


def of_index(folder: Path, value: Any) -> None:
    of_header(folder, HEADER, "part.safetensors")
    write(folder, "model.safetensors.index.json", value)
    read_all(folder)


Kind = tuple[Callable[[Path, Any], None], tuple[dict[str, Any], ...]]
KINDS: dict[str, Kind] = {
    "config.json": (of_config, CONFIGS),
    "generation_config.json": (of_generation, (GENERATION,)),
    "tokenizer_config.json": (of_tokenizer, (TOKENIZER_CONFIG,)),
    "model.safetensors": (of_header, (HEADER,)),
    "model.safetensors.index.json": (of_index, (INDEX,)),
}


def search(kinds: tuple[str, ...] = tuple(KINDS), each: int = 1) -> tuple[Counter[str], list[str]]:
    """Every `each`-th variant; -> how many did what, and what is wrong with the others."""
    found, wrong, number = Counter[str](), list[str](), 0
    with tempfile.TemporaryDirectory() as parent:
        for kind in kinds:
            read, values = KINDS[kind]
            for which, value in enumerate(values):
                for name, variant in variants(value):
                    number += 1
                    if number % each:
                        continue
                    folder = Path(parent) / f"{number}"
                    folder.mkdir()
                    begun = time.perf_counter()
                    try:
                        read(folder, variant)
                        found[f"{kind}: works"] += 1
                    except CellarError as error:
                        said = str(error)
                        found[f"{kind}: refused"] += 1
                        if "\n" in said or len(said) > 1000 or not said.endswith("."):
                            wrong.append(f"{kind} {which} {name}: {said[:200]!r}")
                    except BaseException as error:
                        place = traceback.extract_tb(error.__traceback__)[-1]
                        wrong.append(f"{kind} {which} {name}: {error!r:.100} at {place.filename}:{place.lineno}")
                    if (seconds := time.perf_counter() - begun) > 5:
                        wrong.append(f"{kind} {which} {name}: {seconds:.0f} s")
                    shutil.rmtree(folder)
    return found, wrong


if __name__ == "__main__":
    counts, failures = search()
    print("\n".join(map(ascii, failures)))
    print(json.dumps(counts, indent=1))
