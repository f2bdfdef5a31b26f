"""Models larger than the device by FlexGen 0.1.8 and by Accelerate, held to as much of it as Cellar is.

    pip install flexgen==0.1.8 accelerate
    python -m benchmarks.offload_peers flexgen opt-6.7b --device-memory 16 --batch 8 --prompt 512 --generate 32
    python -m benchmarks.offload_peers flexgen opt-30b --device-memory 16 --percent 20 80 0 100 0 100 --cpu-attention
    python -m benchmarks.offload_peers accelerate llama-3-8b --device-memory 6 --batch 1 --prompt 128 --generate 24

Random weights. `--percent` are FlexGen's six numbers: of weights, of KV and of activations, on the device and in host
memory. FlexGen's seconds are its own: prompts, then each token. Accelerate has the map that it makes itself for the
memory less `--spare` for what a step needs; its seconds are those of `generate` with one token, and of the others. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch

from cellar.models.registry import shipped_config

GIB = 2**30
NEEDED = {"flexgen": ("flexgen",), "accelerate": ("accelerate", "transformers")}
HOST_GIB = 1024
"""Accelerate may put so much into host memory: what does not fit there fails."""

BLOCK = 2**24
"""Numbers that are made."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of this module; 2 if the peer is not installed, or there is no such model."""
    options = parsed(arguments)
    if missing := [name for name in NEEDED[options.peer] if find_spec(name) is None]:
        print(f"{', '.join(missing)} is not installed; see the head of this module.", file=sys.stderr)
        return 2
    if options.peer == "accelerate" and shipped_config(options.model) is None:
        print(f"there is no shipped config {options.model!r}.", file=sys.stderr)
        return 2
    hold(options.device_memory)
    found = (flexgen if options.peer == "flexgen" else accelerate)(options)
    tokens = options.batch * options.batches * options.generate
    found |= {"tokens_per_second": tokens / (found["first"] + found["rest"])}
    found |= {"ms_per_token": 1e3 * found["rest"] / (options.generate - 1), **vars(options)}
    if torch.cuda.is_available():
        found |= {"device": torch.cuda.get_device_name(), "reserved_gib": torch.cuda.max_memory_reserved() / GIB}
    print(json.dumps(found))
    return 0


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=sorted(NEEDED))
    parser.add_argument("model", help="opt-6.7b and so on; for Accelerate any shipped config")
    parser.add_argument("--device-memory", type=float, required=True, help="GiB")
    parser.add_argument("--batch", type=int, default=1, help="sequences at a time")
    parser.add_argument("--batches", type=int, default=1, help="so many of them a block (FlexGen)")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--generate", type=int, default=32)
    parser.add_argument("--percent", type=int, nargs=6, default=[100, 0, 100, 0, 100, 0])
    parser.add_argument("--cpu-attention", action="store_true")
    parser.add_argument("--four-bits", action="store_true", help="weights and KV (FlexGen)")
    parser.add_argument("--dtype", default="bfloat16", help="of Accelerate's weights")
    parser.add_argument("--spare", type=float, default=1.0, help="GiB that Accelerate's map leaves free")
    options = parser.parse_args(arguments)
    if options.generate < 2:
        parser.error("--generate must be 2 or more, so that there is a token behind the first.")
    if options.peer == "accelerate" and options.batches != 1:
        parser.error("--batches is FlexGen's; give Accelerate a larger --batch.")
    return options


def hold(gib: float) -> None:
    """This process gets so much of the device."""
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, gib * GIB / total))


def flexgen(options: argparse.Namespace) -> dict[str, Any]:
    """FlexGen's seconds. Of its own command all but the tokenizer, which would be downloaded."""
    flex: Any = import_module("flexgen.flex_opt")
    flex.AutoTokenizer = SimpleNamespace(from_pretrained=lambda *_, **__: Padded)
    parser = argparse.ArgumentParser()
    flex.add_parser_arguments(parser)
    with tempfile.TemporaryDirectory() as directory:
        flex.run_flexgen(parser.parse_args(flexgen_arguments(options, directory)))
    costs = flex.timers("generate").costs
    return {"first": costs[0], "rest": sum(costs[1:])}


def flexgen_arguments(options: argparse.Namespace, directory: str) -> list[str]:
    """Those of FlexGen's command."""
    given = {
        "model": f"facebook/{options.model}",
        "path": "_DUMMY_",
        "offload-dir": directory,
        "prompt-len": options.prompt,
        "gen-len": options.generate,
        "gpu-batch-size": options.batch,
        "num-gpu-batches": options.batches,
        "log-file": f"{directory}/log",
    }
    found = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    found += ["--percent", *map(str, options.percent)]
    found += ["--cpu-cache-compute"] if options.cpu_attention else []
    return found + (["--compress-weight", "--compress-cache"] if options.four_bits else [])


class Padded:
    """A tokenizer for which each text is one token, as often as it may be."""

    def __init__(self, prompts: Sequence[str], *, max_length: int, **_: Any) -> None:
        self.input_ids = [[2] * max_length for _ in prompts]


def accelerate(options: argparse.Namespace) -> dict[str, Any]:
    """Accelerate's seconds: a model of transformers, dispatched by its own map."""
    library, models = import_module("accelerate"), import_module("transformers")
    raw = {**(shipped_config(options.model) or {})}
    config = models.AutoConfig.for_model(raw.pop("model_type"), **raw)
    dtype = getattr(torch, options.dtype)
    with library.init_empty_weights():
        model = models.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    most: dict[int | str, int] = {"cpu": HOST_GIB * GIB}
    if torch.cuda.is_available():
        most = {0: int((options.device_memory - options.spare) * GIB), **most}
    places = library.infer_auto_device_map(
        model,
        max_memory=most,
        no_split_module_classes=list(model._no_split_modules),
        dtype=dtype,
    )
    filled(model, places)
    model = library.dispatch_model(model, places).eval()
    where = torch.device("cuda:0" if 0 in most else "cpu")
    ids = torch.randint(3, config.vocab_size, (options.batch, options.prompt), device=where)
    generated(model, ids, 2)  # kernels are loaded
    first = generated(model, ids, 1)
    return {
        "first": first,
        "rest": generated(model, ids, options.generate) - first,
        "on_the_device": sum(str(place) == "0" for place in places.values()),
        "modules": len(places),
    }


def filled(model: Any, places: dict[str, Any]) -> None:
    """Random numbers in place of what is not there, in memory of where each module lies: the same ones again and again,
    since a processor makes them more slowly than it copies them.
    """
    some = torch.randn(BLOCK) * 0.02
    for name, parameter in list(model.named_parameters()):
        place = next(place for part, place in places.items() if not part or f"{name}.".startswith(f"{part}."))
        where = torch.device("cpu") if place == "cpu" else torch.device("cuda", place)
        numbers = torch.empty(parameter.shape, dtype=parameter.dtype, device=where)
        if numbers.ndim == 1:
            numbers.fill_(1.0)
        else:
            parts: Sequence[torch.Tensor] = torch.split(numbers.view(-1), len(some))
            for part in parts:
                part.copy_(some[: len(part)])
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, torch.nn.Parameter(numbers, requires_grad=False))
    model.tie_weights()
    for owner, module in model.named_modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                raise RuntimeError(f"{owner}.{name} has no content; this model is not prepared for Accelerate here.")


def generated(model: Any, ids: torch.Tensor, count: int) -> float:
    """Seconds of so many tokens."""
    synchronize()
    begin = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            ids, attention_mask=torch.ones_like(ids), min_new_tokens=count, max_new_tokens=count, do_sample=False
        )
    synchronize()
    return time.perf_counter() - begin


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads of FlexGen do not end
