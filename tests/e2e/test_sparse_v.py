"""Attention to a share of the values: no token changes by company, history or place; elsewhere it is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from benchmarks import accuracy, kv_accuracy
from cellar import LLM, SamplingParams, demo
from cellar.core.errors import ConfigError
from cellar.core.messages import PlacedUnits, Placement
from cellar.models.registry import open_model, read_config
from cellar.planner.saved import Limits
from cellar.runtime.steps.local import _check_sparse
from tests.conformance.test_models import saved_model
from tests.e2e import test_restart
from tests.e2e.test_tiers import CHUNK, CONTEXT, FAMILIES, Tokens, opened, small_options
from tests.quant.test_accuracy import TEXT
from tests.runtime.offload.placements import plan_of, random_placement

SHARE = 0.2
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def prompts() -> list[list[int]]:
    """Of 4 to 53 tokens; every second one begins alike."""
    rng = np.random.default_rng(3)
    prefix = rng.integers(3, 101, CHUNK + 5).tolist()
    return [prefix * (k % 2) + rng.integers(3, 101, 4 + 3 * k).tolist() for k in range(8)]


def tokens(llm: LLM, asked: list[list[int]]) -> Tokens:
    return [o.outputs[0].token_ids for o in llm.generate(asked, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize("form", ["auto", "int4"])
def test_neither_company_nor_history_nor_suspension_changes_a_token(form: str, tmp_path: Path) -> None:
    """Prompts are attended to as decodes are, so what is computed again is what was there."""
    saved_model(FAMILIES[0], tmp_path)
    asked = prompts()

    def options(chunks: int, share: float | None = SHARE) -> dict[str, object]:
        return small_options(tmp_path, chunks, kv_cache_dtype=form, sparse_v=share)

    with opened(tmp_path, **options(400)) as llm:
        alone = [tokens(llm, [prompt])[0] for prompt in asked]
        assert tokens(llm, asked) == alone, "together, from the cache"
        assert llm.stats().prefix_hits > 0
    with opened(tmp_path, **options(400), enable_prefix_caching=False, max_num_batched_tokens=7) as llm:
        assert tokens(llm, asked) == alone, "in pieces, beside others"
    with opened(tmp_path, **options(10), decode_reserve=0.0) as llm:
        assert tokens(llm, asked) == alone, "suspended and computed again"
        assert llm.stats().preemptions > 0
    with opened(tmp_path, **options(400, None)) as llm:
        assert tokens(llm, asked) != alone, "random weights feel the difference"


@pytest.mark.parametrize("kv", [("device", "device"), ("host", "host"), ("host", "device")], ids="/".join)
def test_offloaded_models_give_the_resident_engines_tokens(kv: tuple[str, str], tmp_path: Path) -> None:
    """Matrices stay whole: those in pieces may differ in a last bit, which may choose another value."""
    saved_model(FAMILIES[0], tmp_path)
    asked = prompts()
    with opened(tmp_path, **small_options(tmp_path, 400, sparse_v=SHARE)) as llm:
        wanted = tokens(llm, asked)
    spec = open_model(read_config(tmp_path), "float32", CHUNK, CONTEXT).spec
    placement = random_placement(spec, 5, 60, whole=True, kv=kv)
    file = tmp_path / "plan.json"
    file.write_text(plan_of(spec, placement, Limits(3, 40, CONTEXT)).to_json())
    same = {"device": "cpu", "num_threads": 1, "skip_tokenizer_init": True, "disk_path": tmp_path / "disk"}
    with LLM(tmp_path, plan=file, sparse_v=SHARE, **same) as llm:
        assert tokens(llm, asked) == wanted


def test_what_other_values_have_made_is_not_found_on_disk(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    saved_model(FAMILIES[0], tmp_path / "model")
    plenty, _ = test_restart.run(tmp_path / "model", 400, sparse_v=SHARE)
    disk = tmp_path / "kv"
    answers, figures = test_restart.run(tmp_path / "model", 24, disk=disk, sparse_v=SHARE)
    assert answers == plenty
    assert all(stats.tiers[1].loaded and not stats.tiers[1].failed for stats in figures[1:])
    _, seen = test_restart.run(tmp_path / "model", 24, disk=disk)
    assert seen[0].tiers[1].loaded == 0


def test_where_it_does_not_run_it_is_refused() -> None:
    for share in (0.0, 1.0, -0.1, 10.0):
        with pytest.raises(ConfigError, match="it must be a share between 0 and 1; leave it out"):
            LLM(sparse_v=share, device="cpu")
    with pytest.raises(ConfigError, match="sparse_v does not work on several ranks yet"):
        LLM(sparse_v=0.1, device="cpu", tensor_parallel_size=2)
    gpu = torch.device("cuda", 0)
    with pytest.raises(ConfigError, match="here cuda:0 attends to KV; leave sparse_v out"):
        _check_sparse(gpu, None)

    def placement(place: str, by: str) -> Placement:
        return Placement((), place, "device", "offload", (PlacedUnits(place, 4, by),))

    for place in ("device", "host"):
        with pytest.raises(ConfigError, match="attends to KV"):
            _check_sparse(gpu, placement(place, "device"))
    _check_sparse(gpu, placement("host", "host"))
    _check_sparse(torch.device("cpu"), None)


@pytest.mark.long
def test_what_it_costs_a_text() -> None:
    """Bits per byte of the model that ships, every token reading a tenth of the values."""
    tokenizer = Tokenizer.from_file(str(demo.path() / "tokenizer.json"))
    windows = [tokenizer.encode(TEXT, add_special_tokens=False).ids]
    found = {}
    for name in ("auto", f"auto{kv_accuracy.SPARSE}", f"int4{kv_accuracy.SPARSE}"):
        with kv_accuracy.engine(demo.path(), name, "float32") as llm:
            found[name] = accuracy.bits_per_byte(llm, windows, tokenizer)
    lost = {name: bits / found["auto"] - 1 for name, bits in found.items()}
    assert 0.001 < lost[f"auto{kv_accuracy.SPARSE}"] < 0.06, lost
    assert 0.001 < lost[f"int4{kv_accuracy.SPARSE}"] < 0.06, lost
