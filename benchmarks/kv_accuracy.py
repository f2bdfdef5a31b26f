"""What K and V in fewer bits cost: bits per byte by text and format, through the engine.

    python -m benchmarks.kv_accuracy --data DIR [--model DIR] [--tokens 20000] [--json FILE]

DIR has wikitext2/test.txt, lambada/lambada_test.jsonl and corpus/ (of which the demo model's held-out text is cut, as
its training did). A text is scored in windows of 1,000 tokens, LAMBADA by passages, each token given all before it; all
attention reads the cache. `3 bits` is int4's form with 8 codes: it exceeds int4's bound, so that the bound means
something. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from tokenizers import Tokenizer
from torch import Tensor

from cellar import demo
from cellar.core.kv_formats import KVFormat
from cellar.core.sampling import SamplingParams
from cellar.engine.llm import LLM
from cellar.ops.kv_format import quantized

WINDOW = 1000
THREE_BITS = "3 bits"
FORMATS = ("auto", "fp8", "int4", THREE_BITS)


def texts_of(data: Path) -> Mapping[str, list[str]]:
    """By name: documents, each scored by itself."""
    from scripts.demo_model.text import CHILDREN_FILE, hold_out, read_books, sections, unsuitable

    books = [sections(book) for book in read_books(data / "corpus" / CHILDREN_FILE) if not unsuitable(book)]
    passages = (data / "lambada" / "lambada_test.jsonl").read_text(encoding="utf-8").splitlines()
    return {
        "held-out": ["\n\n".join(stretch) for stretch in hold_out(books)[1]],
        "WikiText-2": [(data / "wikitext2" / "test.txt").read_text(encoding="utf-8")],
        "LAMBADA": [json.loads(line)["text"] for line in passages],
    }


def windows_of(documents: Sequence[str], tokenizer: Tokenizer, tokens: int) -> list[list[int]]:
    """Windows of ids from the front, of so many tokens in all."""
    found: list[list[int]] = []
    for document in documents:
        ids = tokenizer.encode(document[: 12 * tokens], add_special_tokens=False).ids
        for at in range(0, len(ids), WINDOW):
            if tokens <= 0:
                return found
            window = ids[at : at + min(WINDOW, tokens)]
            if len(window) > 1:
                found.append(window)
                tokens -= len(window)
    return found


def three_bits(x: Tensor, form: KVFormat) -> tuple[Tensor, Tensor]:
    """As `quantized` has int4, but with the codes 0 to 7."""
    wide = x.float()
    halves = wide.reshape(*wide.shape[:-1], 2, -1)
    least, largest = halves.aminmax(dim=-1, keepdim=True)
    scale, least = ((largest - least) / 7).bfloat16(), least.bfloat16()
    inverse = torch.where(scale > 0, 1 / scale.float(), 0.0)
    codes = ((halves - least.float()) * inverse).clamp_(0, 7).round_().to(torch.uint8)
    scales = torch.stack((scale, least), dim=-1).flatten(-3)
    return codes[..., 0, :] | codes[..., 1, :] << 4, scales.view(torch.uint8)


@contextmanager
def engine(model: str | None, name: str, dtype: str) -> Iterator[LLM]:
    """An engine on the CPU with K and V in that format."""
    how = three_bits if name == THREE_BITS else quantized
    kept = "int4" if name == THREE_BITS else name
    with (
        patch("cellar.ops.rotary.definition.quantized", how),
        LLM(model, dtype=dtype, device="cpu", kv_cache_dtype=kept, enable_prefix_caching=False) as llm,
    ):
        yield llm


def bits_per_byte(llm: LLM, windows: Sequence[list[int]], tokenizer: Tokenizer) -> float:
    """Bits for each byte of the windows; the first token of each is given."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    bits, size = 0.0, 0
    for output in llm.generate([list(w) for w in windows], params, use_tqdm=False):
        ids, tables = list(output.prompt_token_ids or ()), output.prompt_logprobs
        assert tables is not None
        for id, table in zip(ids[1:], tables[1:], strict=True):
            assert table is not None
            bits -= table[id].logprob / math.log(2)
        size += len(tokenizer.decode(ids[1:], skip_special_tokens=False).encode())
    return bits / size


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_accuracy", description="Bits per byte by KV format.")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default=None, help="directory; default: the demo model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=20_000, help="of each text")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    folder = demo.path() if options.model is None else Path(options.model)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = {name: windows_of(found, tokenizer, options.tokens) for name, found in texts_of(options.data).items()}
    found: dict[str, dict[str, float]] = {name: {} for name in texts}
    for name in options.formats.split(","):
        with engine(options.model, name, options.dtype) as llm:
            for text, windows in texts.items():
                found[text][name] = bits = bits_per_byte(llm, windows, tokenizer)
                more = f"{100 * (bits / found[text]['auto'] - 1):+.3f} %" if "auto" in found[text] else ""
                print(f"{text:12} {name:7} {bits:.5f} bits per byte {more}", flush=True)
    print(json.dumps(found))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
