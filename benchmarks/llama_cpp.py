"""Cellar beside llama.cpp on this machine's processor: ms a step of so many sequences, and tokens/s of a prompt.

    pip install llama-cpp-python gguf      # builds llama.cpp for this processor: some minutes and a compiler
    python -m benchmarks.llama_cpp --model llama-3.2-1b

A Llama of a shipped config with random weights, in bfloat16 and in 8 and 4 bits: llama.cpp's Q8_0 and Q4_0, Cellar's
int8 and int4 (groups of 64, the head in 8 bits). Both have the same threads, each measurement a process of its own, one
after another. llama.cpp's seconds are those of `llama_decode`; Cellar's are a step with its sampling, and a prompt by
`LLM.generate` until its first token. Medians of steps, the best of three prompts; the last line is JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cellar.bench.step.command import WARM_STEPS, DecodeBench
from cellar.models.registry import shipped_config

NEEDED = ("llama_cpp", "gguf")
FORMATS = {"bfloat16": ("bf16", None), "int8": ("q8_0", "int8"), "int4": ("q4_0", "int4")}
"""What a format is called: llama.cpp's, and Cellar's `quantization`."""

PROMPT_ROUNDS = 3
_SILENCE = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda level, text, data: None)


@dataclass(frozen=True)
class Work:
    """What both do. A prompt stands alone (`batch` 0); else so many sequences decode behind `length` positions each."""

    batch: int
    length: int
    steps: int = 12


def tensors(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape, as llama.cpp calls the tensors of a Llama whose head is its embedding."""
    wide, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"] * config["head_dim"]
    kv_heads = config["num_key_value_heads"] * config["head_dim"]
    found: dict[str, tuple[int, ...]] = {"token_embd": (config["vocab_size"], wide), "output_norm": (wide,)}
    for i in range(config["num_hidden_layers"]):
        layer = {
            "attn_norm": (wide,), "attn_q": (heads, wide), "attn_k": (kv_heads, wide), "attn_v": (kv_heads, wide),
            "attn_output": (wide, heads), "ffn_norm": (wide,), "ffn_gate": (inner, wide), "ffn_up": (inner, wide),
            "ffn_down": (wide, inner),
        }  # fmt: skip
        found |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return found


def write(config: Mapping[str, Any], path: Path) -> None:
    """The model in bfloat16, with random weights and no words."""
    gguf = import_module("gguf")
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(8192)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("no_vocab")
    for name, shape in tensors(config).items():
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
            continue
        numbers = torch.randn(shape).mul_(0.02).bfloat16().view(torch.uint8).numpy()
        kind = gguf.GGMLQuantizationType.BF16
        writer.add_tensor(f"{name}.weight", numbers, raw_shape=numbers.shape, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quiet() -> Any:
    """llama.cpp's library, which says nothing of what it does."""
    lib = import_module("llama_cpp")
    lib.llama_log_set(_SILENCE, None)
    return lib


def quantize(directory: Path) -> None:
    """The model's other two files, by llama.cpp itself."""
    lib = quiet()
    for name, kind in (("q8_0", lib.LLAMA_FTYPE_MOSTLY_Q8_0), ("q4_0", lib.LLAMA_FTYPE_MOSTLY_Q4_0)):
        how = lib.llama_model_quantize_default_params()
        how.ftype = kind
        files = (str(directory / f"{part}.gguf").encode() for part in ("bf16", name))
        if lib.llama_model_quantize(*files, ctypes.byref(how)) != 0:
            raise RuntimeError(f"llama.cpp did not write {name}.")


class LlamaCpp:
    """A model file, and contexts in which its steps are timed."""

    def __init__(self, path: Path, threads: int, vocabulary: int) -> None:
        self._lib, self._threads, self._vocabulary = quiet(), threads, vocabulary
        self._lib.llama_backend_init()
        self._model = self._lib.llama_model_load_from_file(str(path).encode(), self._lib.llama_model_default_params())
        self._random = np.random.default_rng(0)

    def seconds(self, work: Work) -> float:
        """As the head of this file says."""
        if not work.batch:
            with self._context(work.length + 32, 1) as context:
                times = []
                for _ in range(PROMPT_ROUNDS):
                    self._lib.llama_memory_clear(self._lib.llama_get_memory(context), True)
                    times.append(self._decode(context, [(p, 0) for p in range(work.length)]))
                return min(times)
        longest = work.length + WARM_STEPS + work.steps
        with self._context(max(512, work.batch * (longest + 32)), work.batch) as context:
            for sequence in range(work.batch):
                self._decode(context, [(p, sequence) for p in range(work.length)])
            steps = range(work.length, longest)
            times = [self._decode(context, [(p, sequence) for sequence in range(work.batch)]) for p in steps]
        return statistics.median(times[WARM_STEPS:])

    @contextmanager
    def _context(self, positions: int, sequences: int) -> Iterator[Any]:
        how = self._lib.llama_context_default_params()
        how.n_ctx, how.n_batch, how.n_seq_max, how.kv_unified = positions, 2048, sequences, True
        how.n_threads = how.n_threads_batch = self._threads
        context = self._lib.llama_init_from_model(self._model, how)
        try:
            yield context
        finally:
            self._lib.llama_free(context)

    def _decode(self, context: Any, places: Sequence[tuple[int, int]]) -> float:
        """A random token at each of these positions and sequences; logits of the last of each sequence."""
        batch = self._lib.llama_batch_init(len(places), 0, 1)
        last = {sequence: k for k, (_, sequence) in enumerate(places)}
        for k, (position, sequence) in enumerate(places):
            batch.token[k] = int(self._random.integers(0, self._vocabulary))
            batch.pos[k], batch.n_seq_id[k], batch.seq_id[k][0] = position, 1, sequence
            batch.logits[k] = last[sequence] == k
        batch.n_tokens = len(places)
        begin = time.perf_counter()
        code = self._lib.llama_decode(context, batch)
        self._lib.llama_synchronize(context)
        seconds = time.perf_counter() - begin
        self._lib.llama_batch_free(batch)
        if code:
            raise RuntimeError(f"llama_decode gave {code}.")
        return seconds


def theirs(path: Path, threads: int, vocabulary: int, works: Sequence[Work]) -> list[float]:
    """llama.cpp's seconds of each."""
    model = LlamaCpp(path, threads, vocabulary)
    return [model.seconds(work) for work in works]


def ours(name: str, quantization: str | None, threads: int, works: Sequence[Work]) -> list[float]:
    """Cellar's."""
    return [
        _step(name, quantization, threads, work) if work.batch else _prompt(name, quantization, threads, work.length)
        for work in works
    ]


def _step(name: str, quantization: str | None, threads: int, work: Work) -> float:
    how: dict[str, Any] = {"dtype": "bfloat16", "device": "cpu", "num_threads": threads, "quantization": quantization}
    with DecodeBench(name, work.batch, work.length, num_steps=work.steps, **how) as bench:
        return bench.seconds()


def _prompt(name: str, quantization: str | None, threads: int, length: int) -> float:
    from cellar import LLM, SamplingParams

    how: dict[str, Any] = {"dtype": "bfloat16", "device": "cpu", "num_threads": threads, "quantization": quantization}
    how |= {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": length + 32}
    with LLM(name, **how, max_num_batched_tokens=max(512, length)) as llm:
        random, times = np.random.default_rng(0), []
        for _ in range(PROMPT_ROUNDS):
            ids = random.integers(100, 1000, length).tolist()
            begin = time.perf_counter()
            llm.generate([ids], SamplingParams(max_tokens=1, temperature=0, ignore_eos=True), use_tqdm=False)
            times.append(time.perf_counter() - begin)
    return min(times)


def alone(function: Any, *arguments: Any) -> Any:
    """What the function returns in a process of its own: nobody's threads are left."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.2-1b", help="a shipped config of a Llama that ties its head")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--batches", default="1,4,8,16,32")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--prompts", default="128,512")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(arguments)
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        sys.exit(f"{' and '.join(missing)} cannot be imported; `pip install llama-cpp-python gguf` brings both.")
    config = shipped_config(options.model)
    if config is None or config["model_type"] != "llama" or not config["tie_word_embeddings"]:
        sys.exit(f"{options.model!r} is no shipped config of a Llama that ties its head; llama-3.2-1b is one.")
    works = [Work(int(batch), options.context) for batch in options.batches.split(",")]
    works += [Work(0, int(length)) for length in options.prompts.split(",") if length]
    found = []
    with tempfile.TemporaryDirectory() as where:
        alone(write, config, Path(where) / "bf16.gguf")
        alone(quantize, Path(where))
        for name in options.formats.split(","):
            file, quantization = FORMATS[name]
            sides = {
                "llama.cpp": (theirs, Path(where) / f"{file}.gguf", options.threads, config["vocab_size"], works),
                "Cellar": (ours, options.model, quantization, options.threads, works),
            }
            for side, call in sides.items():
                for work, seconds in zip(works, alone(*call), strict=True):
                    found.append(asdict(work) | {"side": side, "format": name, "seconds": seconds})
                    print(_line(side, name, work, seconds), flush=True)
    print(json.dumps({"model": options.model, "threads": options.threads, "rows": found}))


def _line(side: str, name: str, work: Work, seconds: float) -> str:
    if not work.batch:
        return f"{side} {name}: a prompt of {work.length} at {work.length / seconds:.0f} tok/s"
    return f"{side} {name}: {work.batch} x {work.length}: {seconds * 1e3:.1f} ms a step"


if __name__ == "__main__":
    main()
