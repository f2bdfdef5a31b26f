"""An open front over FakeRuntime: the whole engine with a tiny tokenizer and tokens that can be computed by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cellar.core.config import EngineConfig
from cellar.core.messages import StepPlan, Tier
from cellar.core.specs import KVGroup, KVSpec, ModelSpec
from cellar.engine.engine import Engine
from cellar.engine.front import Front
from cellar.engine.opened import Opened
from cellar.engine.prompts import PromptReader
from cellar.engine.steps import StepEngine, step_engine
from cellar.engine.structured import Masking
from cellar.routing.basis import Basis
from cellar.routing.digest import DigestShape
from cellar.runtime.protocol import Capacity, Runtime
from cellar.runtime.steps.fake import FakeRuntime, next_token
from cellar.schedule.steps.scheduler import StepScheduler
from cellar.text.chat import ChatTemplate
from cellar.text.tokenizer import Tokenizer

TOKENIZER = Path(__file__).parent / "data" / "tokenizers" / "gpt-tiny"
CHUNK = 16
ROOMY: dict[str, Any] = {"max_model_len": 8_192, "num_slots": 2_048}
ENDLESS = 8_000
"""Tokens of a request that ends in no test by itself, if there is room: it takes 16 s at 2 ms a step."""
TEMPLATE = (
    "{% for t in tools or [] %}[tool] {{ t.function.name }}\n{% endfor %}"
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}{{ extra }}"
)


def open_fake(
    *,
    num_slots: int = 64,
    num_rows: int = 8,
    max_model_len: int = 256,
    tokenizer: bool = True,
    seed: int = 0,
    caching: bool = True,
    policy: str = "fcfs",
    masker: Masking | None = None,
    mask_timeout: float = 5.0,
    template: str = TEMPLATE,
    wrap: Callable[[FakeRuntime], Runtime[StepPlan]] = lambda runtime: runtime,
    **fake: Any,
) -> tuple[Opened, FakeRuntime]:
    """The front as `open_front` makes it, and the runtime below it, seen by the engine through `wrap`."""
    text = Tokenizer.load(TOKENIZER) if tokenizer else None
    vocab = text.vocab_size if text is not None else 97
    runtime = FakeRuntime(Capacity(num_slots, num_rows, CHUNK, max_model_len), vocab_size=vocab, **fake)
    config = EngineConfig.of(max_num_seqs=num_rows, max_num_batched_tokens=64, seed=seed, scheduling_policy=policy)
    scheduler = StepScheduler(num_slots, num_rows, CHUNK, max_model_len, config.schedule, caching)
    reader = PromptReader(vocab_size=vocab, max_model_len=max_model_len, eos_token_ids=(2,), tokenizer=text, seed=seed)
    front = Front(
        step_engine(scheduler, wrap(runtime), masker=masker, mask_timeout=mask_timeout),
        reader,
        text,
        ChatTemplate(template, text.special_tokens) if text else None,
    )
    shape = DigestShape.of({Tier.DEVICE: num_slots})
    basis = Basis(b"" if caching else None, CHUNK, {1: 1.0}, shape)
    return Opened(front, config, _spec(vocab, max_model_len), None, outlook=scheduler.outlook, basis=basis), runtime


def engine_of(opened: Opened) -> StepEngine:
    """The engine below a front of this process."""
    engine = opened.front.engine
    assert isinstance(engine, Engine)
    return engine


def continuation(prompt: list[int], count: int, vocab_size: int) -> list[int]:
    """The tokens that the fake makes of a prompt; shorter if the end symbol (2) comes."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        tokens.append(next_token(tokens, vocab_size))
        if tokens[-1] == 2:
            break
    return tokens[len(prompt) :]


def _spec(vocab_size: int, max_position: int) -> ModelSpec:
    return ModelSpec(
        model_type="fake",
        dtype="float32",
        hidden_size=3,
        num_layers=0,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        intermediate_size=1,
        vocab_size=vocab_size,
        max_position=max_position,
        embedding=(),
        layers=(),
        head=(),
        kv=KVSpec((KVGroup("full", "full", (), 1, 1, "float32"),), CHUNK),
    )
