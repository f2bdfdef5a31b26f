"""K and V in fewer bits change no token by where they lay, in whose company they were computed, or how often."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from benchmarks import accuracy, kv_accuracy
from cellar import LLM, SamplingParams, demo
from cellar.core.errors import ConfigError
from cellar.core.messages import Tier
from cellar.core.sampling import StructuredOutputsParams
from tests.conformance.test_models import Case, saved_model
from tests.e2e import test_restart
from tests.e2e.test_tiers import CHUNK, FAMILIES, Tokens, opened, small_options, talk
from tests.quant.test_accuracy import TEXT

FORMATS = ("fp8", "int4")


@pytest.mark.long
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.name)
def test_tokens_from_the_host_are_those_of_plenty(case: Case, form: str, tmp_path: Path) -> None:
    saved_model(case, tmp_path)
    plenty, _, _ = talk(tmp_path, 400, kv_cache_dtype=form)
    scarce, tiers, hits = talk(tmp_path, 12, kv_offloading_size=0.01, kv_cache_dtype=form)
    alone, _, fewer = talk(tmp_path, 12, kv_cache_dtype=form)
    assert (tiers[1].tier, tiers[1].failed) == (Tier.HOST, 0)
    assert tiers[1].loaded > 20, "chunks come back with their scales"
    assert hits > fewer, "so less is computed again"
    assert scarce == plenty
    assert alone == plenty


@pytest.mark.parametrize("form", FORMATS)
def test_every_turn_by_an_engine_of_its_own(form: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    saved_model(FAMILIES[0], tmp_path / "model")
    plenty, _ = test_restart.run(tmp_path / "model", 400, kv_cache_dtype=form)
    disk = tmp_path / "kv"
    answers, figures = test_restart.run(tmp_path / "model", 24, disk=disk, kv_cache_dtype=form)
    assert answers == plenty
    assert all(stats.tiers[1].loaded and not stats.tiers[1].failed for stats in figures[1:])
    # What was written in another format is not found.
    other, seen = test_restart.run(tmp_path / "model", 24, disk=disk, kv_cache_dtype="auto")
    assert other == test_restart.run(tmp_path / "model", 400)[0]
    assert seen[0].tiers[1].loaded == 0


@pytest.mark.parametrize("form", FORMATS)
def test_neither_company_nor_history_nor_suspension_changes_a_token(form: str, tmp_path: Path) -> None:
    saved_model(FAMILIES[0], tmp_path)
    rng = np.random.default_rng(3)
    prefix = rng.integers(3, 101, CHUNK + 5).tolist()
    prompts = [prefix * (k % 2) + rng.integers(3, 101, 4 + 3 * k).tolist() for k in range(8)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)

    def tokens(llm: LLM, prompts: list[list[int]]) -> Tokens:
        return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]

    def options(chunks: int) -> dict[str, object]:
        return small_options(tmp_path, chunks, kv_cache_dtype=form)

    with opened(tmp_path, **options(400)) as llm:
        alone = [tokens(llm, [prompt])[0] for prompt in prompts]
        assert tokens(llm, prompts) == alone, "together, from the cache"
        assert llm.stats().prefix_hits > 0
    with opened(tmp_path, **options(400), enable_prefix_caching=False, max_num_batched_tokens=7) as llm:
        assert tokens(llm, prompts) == alone, "in pieces, beside others"
    with opened(tmp_path, **options(10), decode_reserve=0.0) as llm:
        assert tokens(llm, prompts) == alone, "suspended and computed again"
        assert llm.stats().preemptions > 0
    with opened(tmp_path, **options(400) | {"kv_cache_dtype": "auto"}) as llm:
        assert tokens(llm, prompts) != alone, "random weights feel the difference"


@pytest.mark.parametrize("form", FORMATS)
def test_structured_output_and_samples(form: str) -> None:
    asked = StructuredOutputsParams(
        json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    )
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=60, n=2, structured_outputs=asked)
    found = []
    for caching in (True, False):
        with LLM(dtype="float32", device="cpu", kv_cache_dtype=form, enable_prefix_caching=caching) as llm:
            found.append([o.text for o in llm.generate("Once upon a time", params, use_tqdm=False)[0].outputs])
    assert found[0] == found[1]
    assert all(text.lstrip().startswith("{") for text in found[0])


def test_memory_holds_more_chunks(tmp_path: Path) -> None:
    saved_model(FAMILIES[0], tmp_path)
    totals = {}
    for form in ("auto", *FORMATS):
        options = small_options(tmp_path, 40) | {"kv_cache_dtype": form}
        with opened(tmp_path, **options) as llm:
            totals[form] = llm.stats().total_chunks
            assert llm.spec.kv.chunk_nbytes() * totals[form] <= int(str(options["kv_cache_memory_bytes"]))
    assert totals["auto"] == 40
    assert 2 * totals["auto"] < totals["fp8"] < totals["int4"] * 2


@pytest.mark.long
def test_what_it_costs_a_text() -> None:
    """Bits per byte of the model that ships; three bits cost more than four do."""
    tokenizer = Tokenizer.from_file(str(demo.path() / "tokenizer.json"))
    windows = [tokenizer.encode(TEXT, add_special_tokens=False).ids]
    found = {}
    for name in ("auto", *FORMATS, kv_accuracy.THREE_BITS):
        with kv_accuracy.engine(demo.path(), name, "float32") as llm:
            found[name] = accuracy.bits_per_byte(llm, windows, tokenizer)
    lost = {name: bits / found["auto"] - 1 for name, bits in found.items()}
    assert 0 < abs(lost["fp8"]) < 0.003, lost
    assert 0 < abs(lost["int4"]) < 0.03, lost
    assert lost["int4"] < lost[kv_accuracy.THREE_BITS], lost


def test_other_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="'nvfp4' is not implemented; use auto"):
        LLM(kv_cache_dtype="nvfp4", device="cpu")
