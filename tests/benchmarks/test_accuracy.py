from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest

from benchmarks import kv_accuracy, weight_accuracy
from scripts.demo_model.text import CHILDREN_FILE, END_OF_TEXT

SENTENCE = "The little fox ran through the wood and looked for her brother, who had hidden behind an old oak. "


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A directory as the texts come in: twenty short books, a page, two passages."""
    for name in ("corpus", "wikitext2", "lambada"):
        (tmp_path / name).mkdir()
    book = "\n\n".join(f"{SENTENCE * 4}They were {i} then." for i in range(30))
    with lzma.open(tmp_path / "corpus" / CHILDREN_FILE, "wt", encoding="utf-8") as file:
        file.write(END_OF_TEXT.join([book] * 20))
    (tmp_path / "wikitext2" / "test.txt").write_text(SENTENCE * 9, encoding="utf-8")
    passages = (json.dumps({"text": text}) for text in (SENTENCE, f"Once upon a time. {SENTENCE}"))
    (tmp_path / "lambada" / "lambada_test.jsonl").write_text("\n".join(passages), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("module", [weight_accuracy, kv_accuracy], ids=["weights", "kv"])
def test_every_text_is_scored_in_every_format(module, data, capsys) -> None:  # type: ignore[no-untyped-def]
    first, out = module.FORMATS[0], data / "out.json"
    module.main(["--data", str(data), "--tokens", "60", "--formats", f"{first},3 bits", "--json", str(out)])
    found = json.loads(out.read_text())
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1]) == found
    assert list(found) == ["held-out", "WikiText-2", "LAMBADA"]
    assert len(lines) == 1 + 2 * len(found)
    for text, bits in found.items():
        assert 0 < bits[first] < 8, text
        assert bits["3 bits"] != bits[first], "the format was not used"
        change = f"{100 * (bits['3 bits'] / bits[first] - 1):+.3f} %"
        assert any(line.startswith(text) and line.endswith(change) for line in lines)
