"""Makes the tiny tokenizers beside this file, one directory each: `python make.py`. Their text is in this file.

opt-tiny: vocab.json + merges.txt as OPT has them; </s> (id 2) opens every text. gpt-tiny: byte-level BPE in
tokenizer.json, no BOS. llama-tiny: SentencePiece style with byte fallback, <s> opens every text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = Path(__file__).parent
TEXT = """The cellar under the old house was cold and dark, and the wine in it was older than the house itself.
Once upon a time there was a little girl who lived in a small village near the forest. She was the prettiest
creature who was ever seen. Her mother was excessively fond of her; and her grandmother loved her still more.
What is it? It is a tokenizer: it cuts text, letter by letter, word by word. 1, 2, 3, 10, 100. Don't you see?
The café, the naïve façade, the Größe, żółw, привет, мир, 日本語, 中文, 한국어 — "quoted" … and so on.
"""


def byte_level(vocab_size: int, special: list[str]) -> Tokenizer:
    """Byte-level BPE with all 256 bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Llama 2's scheme: spaces are ▁, one more opens the text, unknown characters are their UTF-8 as <0xNN>."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=160, show_progress=False)
    # Without the last line: its letters go through the bytes.
    trained.train_from_iterator(TEXT.splitlines()[:-1], trainer)
    model: dict[str, Any] = json.loads(trained.to_str())["model"]
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names = first + sorted(model["vocab"], key=model["vocab"].get)
    merges = [tuple(merge) for merge in model["merges"]]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def write(name: str, files: dict[str, Any]) -> None:
    """Write a directory; values that are no strings become JSON."""
    (HERE / name).mkdir(exist_ok=True)
    for file, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, indent=1) + "\n"
        (HERE / name / file).write_text(text, encoding="utf-8")


def main() -> None:
    """Write all three."""
    opt = json.loads(byte_level(420, ["<s>", "<pad>", "</s>", "<unk>"]).to_str())["model"]
    end = {"content": "</s>", "lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
    write(
        "opt-tiny",
        {
            "vocab.json": opt["vocab"],
            "merges.txt": "#version: 0.2\n" + "".join(" ".join(merge) + "\n" for merge in opt["merges"]),
            "tokenizer_config.json": {
                "errors": "replace",
                "unk_token": {"__type": "AddedToken", **end},
                "bos_token": {"__type": "AddedToken", **end},
                "eos_token": {"__type": "AddedToken", **end},
                "pad_token": {"__type": "AddedToken", **end, "content": "<pad>"},
                "add_prefix_space": False,
                "add_bos_token": True,
                "tokenizer_class": "GPT2Tokenizer",
            },
            "special_tokens_map.json": {"bos_token": end, "eos_token": end, "unk_token": end, "pad_token": "<pad>"},
        },
    )
    gpt = byte_level(420, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    write(
        "gpt-tiny",
        {
            "tokenizer.json": json.loads(gpt.to_str()),
            "tokenizer_config.json": {
                "bos_token": None,
                "eos_token": "<|im_end|>",
                "pad_token": "<|endoftext|>",
                "tokenizer_class": "PreTrainedTokenizerFast",
                "chat_template": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
                "{{ '<|im_end|>\n' }}{% endfor %}"
                "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
            },
            "generation_config.json": {"eos_token_id": [2, 0]},
        },
    )
    write(
        "llama-tiny",
        {
            "tokenizer.json": json.loads(byte_fallback().to_str()),
            "tokenizer_config.json": {
                "bos_token": "<s>",
                "eos_token": "</s>",
                "unk_token": "<unk>",
                "tokenizer_class": "PreTrainedTokenizerFast",
            },
            "generation_config.json": {"eos_token_id": 2},
        },
    )


if __name__ == "__main__":
    main()
