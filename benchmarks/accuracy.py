"""Bits per byte of texts through engines that keep numbers in fewer bits: what `weight_accuracy` and `kv_accuracy` run.

A data directory has wikitext2/test.txt, lambada/lambada_test.jsonl and corpus/ (of which the demo model's held-out text
is cut, as its training did). A text is scored in windows of 1,000 tokens, LAMBADA by passages, each token given all
before it.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from tokenizers import Tokenizer

from cellar import demo
from cellar.core.sampling import SamplingParams
from cellar.engine.llm import LLM

WINDOW = 1000

Opened = Callable[[Path, str, str], AbstractContextManager[LLM]]
"""An engine on the CPU of a model's directory, in a format of this name, with activations in a dtype."""


def run(module: str, doc: str, formats: Sequence[str], engine: Opened, arguments: Sequence[str] | None) -> None:
    """The command line of a module: every text through every format; `formats[0]` is what the others are compared to.

    The last line printed is JSON: bits per byte by text and format.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}", description=doc.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=demo.path(), help="directory; default: the demo model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=20_000, help="of each text")
    parser.add_argument("--formats", default=",".join(formats))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    texts = {name: windows_of(found, tokenizer, options.tokens) for name, found in texts_of(options.data).items()}
    found: dict[str, dict[str, float]] = {name: {} for name in texts}
    for name in options.formats.split(","):
        with engine(options.model, name, options.dtype) as llm:
            for text, windows in texts.items():
                found[text][name] = bits = bits_per_byte(llm, windows, tokenizer)
                base = found[text].get(formats[0])
                more = "" if base is None else f"{100 * (bits / base - 1):+.3f} %"
                print(f"{text:12} {name:14} {bits:.5f} bits per byte {more}", flush=True)
    print(json.dumps(found))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


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
