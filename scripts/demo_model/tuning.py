"""Tuning against repeats: a restrained decoder is moved into the weights, on the model's own continuations.

At every token of continuations the model made itself, the target is what the untuned model would say next under
the restraint of ``repeats.Restraint``. That the states come from the learner and not from the restrained decoder
alone follows Ross, Gordon and Bagnell, "A Reduction of Imitation Learning and Structured Prediction to No-Regret
Online Learning" (2011), algorithm 3.1; without it one slip leads where no target was ever given. At the end the
weights go further the way they moved, as Ilharco et al., "Editing Models with Task Arithmetic" (2023), section 3,
scale a task vector.
"""

from __future__ import annotations

import copy
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from .network import Decoder, Shape, StoryModel
from .repeats import Restraint, repeat_mask, share_repeating
from .text import END_ID
from .training import Data, bits_per_byte, load_weights, rate_scale, save_weights

LONGEST_PROMPT = 48


@dataclass(frozen=True)
class AntiRepeat:
    """How to tune against repeats."""

    steps: int = 1400
    rate: float = 6e-4
    batch: int = 256
    new_tokens: int = 240
    bar_4: float = 4.0  # taken off a token that ends a repeated run of 4
    bar_5: float = 20.0  # and, on top, of 5
    overuse: float = 2.0
    window: int = 128
    sharpen: float = 0.8  # temperature of the target
    slip: float = 3.0  # extra weight where the model's first choice is not the target's
    story_weight: float = 1.0
    text_batch: int = 16
    children: float = 0.5
    evaluate_every: int = 50
    highest_bpb: float = 1.28
    overshoot: float = 1.25  # length of the final move away from the untuned weights, in moves of the tuning
    seed: int = 20261122


def random_prompts(data: Data, rng: np.random.Generator, count: int, length: int) -> Tensor:
    """Prompts [count, length] from the children's training text: half at document starts, half anywhere.

    All start with the end-of-text id, as a user's prompt does.
    """
    stream = data.children
    heads = torch.nonzero(stream == END_ID).flatten()
    heads = heads[heads < len(stream) - length - 1]
    at_head = heads[torch.from_numpy(rng.integers(0, len(heads), count // 2)).to(stream.device)] + 1
    free = rng.integers(0, len(stream) - length - 1, count - count // 2)
    anywhere = torch.from_numpy(free).to(stream.device)
    starts = torch.cat((at_head, anywhere))
    body = stream[starts[:, None] + torch.arange(length - 1, device=stream.device)].long()
    return F.pad(body, (1, 0), value=END_ID)


def held_out_prompts(data: Data, count: int, length: int) -> Tensor:
    """Evenly spaced prompts [count, length] of the held-out text, led by the end-of-text id."""
    starts = torch.linspace(0, len(data.held_out) - length - 1, count, device=data.device).long()
    body = data.held_out[starts[:, None] + torch.arange(length - 1, device=data.device)].long()
    return F.pad(body, (1, 0), value=END_ID)


def story_loss(
    model: StoryModel, untuned: StoryModel, rows: Tensor, new_tokens: int, restraint: Restraint, recipe: AntiRepeat
) -> tuple[Tensor, Tensor]:
    """Cross-entropy to the restrained untuned model on the last ``new_tokens`` of [batch, time]; share of slips.

    A slip is a place where the two first choices differ.
    """
    context = rows[:, :-1]
    with torch.no_grad():
        expected = untuned.logits(untuned.hidden_states(context)[:, -new_tokens:]).float()
        expected -= restraint.penalty(context, new_tokens)
        expected[..., END_ID] = -torch.inf
        best = expected.argmax(-1)
        expected = (expected / recipe.sharpen).softmax(-1)
    said = model.logits(model.hidden_states(context)[:, -new_tokens:]).float()
    slips = (said.detach().argmax(-1) != best).float()
    weights = 1 + recipe.slip * slips
    losses = F.cross_entropy(said.flatten(0, 1), expected.flatten(0, 1), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum(), slips.mean()


def text_loss(model: StoryModel, untuned: StoryModel, text: Tensor) -> Tensor:
    """Cross-entropy to the untuned model on real text [batch, time]: it may not forget, nor learn by heart."""
    with torch.no_grad():
        expected = untuned.logits(untuned.hidden_states(text)).float().softmax(-1)
    said = model.logits(model.hidden_states(text)).float()
    return F.cross_entropy(said.flatten(0, 1), expected.flatten(0, 1))


@torch.no_grad()
def overshoot(model: StoryModel, untuned: StoryModel, factor: float) -> None:
    """Move the weights to ``factor`` times their distance from the untuned ones."""
    for weight, start in zip(model.parameters(), untuned.parameters(), strict=True):
        weight.copy_(start + factor * (weight - start))


def tune(
    work: Path, source: Path, target: Path, shape: Shape, recipe: AntiRepeat, minutes: float, device: torch.device
) -> None:
    """Tune the weights of ``source`` against repeats and write the result to ``target``.

    Taken is the step with the fewest repeating held-out stories among those of at most ``highest_bpb``, moved on by
    ``overshoot``. Its own weights are in the folder "best", those of the last step in "last".
    """
    started = time.perf_counter()
    torch.manual_seed(recipe.seed)
    torch.set_float32_matmul_precision("high")
    data = Data(work, device)
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    model = StoryModel(shape).to(device)
    assert load_weights(model, source), f"no weights in {source}"
    untuned = copy.deepcopy(model).requires_grad_(False)
    narrow = StoryModel(shape).to(device, torch.bfloat16)
    narrow.cos, narrow.sin = model.cos, model.sin
    narrow.load_state_dict(model.state_dict())
    restraint = Restraint.of_text(
        torch.cat((data.children, data.books)),
        shape.vocab_size,
        {4: recipe.bar_4, 5: recipe.bar_5},
        recipe.overuse,
        recipe.window,
    )
    decode = Decoder(narrow.eval(), recipe.batch, LONGEST_PROMPT + recipe.new_tokens, END_ID, restraint)
    adam = torch.optim.AdamW(model.parameters(), lr=recipe.rate, betas=(0.9, 0.95), weight_decay=0.0)
    probe = held_out_prompts(data, recipe.batch, 24)
    log: list[dict[str, float]] = []
    best = 2.0
    step = 0
    while True:
        elapsed = time.perf_counter() - started
        done = max(step / recipe.steps, elapsed / (minutes * 60))
        narrow.load_state_dict(model.state_dict())
        if step % recipe.evaluate_every == 0 or done >= 1:
            stories = decode(probe, 200)
            bpb = bits_per_byte(model, data.held_out, data.held_out_bytes)
            entry = {"step": step, "held_out_repeating": share_repeating(stories), "held_out_bpb": round(bpb, 4)}
            entry["tokens_in_repeats"] = round(float(repeat_mask(stories, 8).float().mean()), 4)
            log.append(entry)
            print(json.dumps(entry), f"{elapsed:.0f} s", flush=True)
            for row in (step // recipe.evaluate_every * 5 % recipe.batch, -1):
                print("   ", repr(tokenizer.decode(torch.cat((probe[row], stories[row])).tolist())), flush=True)
            if entry["held_out_repeating"] <= best and bpb <= recipe.highest_bpb and step:
                best = entry["held_out_repeating"]
                save_weights(model, target / "best")
        if done >= 1:
            break
        rng = np.random.default_rng([recipe.seed, step])
        prompts = random_prompts(data, rng, recipe.batch, int(rng.integers(5, LONGEST_PROMPT)))
        # Half the rows as a user would get them; the rest under some restraint, to see late places of good stories.
        # A quarter of either has noise, so that the states differ from step to step.
        chance = torch.from_numpy(rng.random((3, recipe.batch))).float().to(device)
        restrained = torch.where(chance[0] < 0.5, 0.0, chance[1])
        temperature = torch.where(chance[2] < 0.25, 0.5, 0.0)
        rows = torch.cat((prompts, decode(prompts, recipe.new_tokens, restrained, temperature)), dim=1)
        text = data.batch(rng, recipe.text_batch, shape.context - 1, recipe.children)
        text[::2, 0] = END_ID  # so that real text, too, is seen right after the first token of a prompt
        for group in adam.param_groups:
            group["lr"] = recipe.rate * rate_scale(done, 0.03, 0.3)
        with torch.autocast(device.type, torch.bfloat16):
            loss, slips = story_loss(model, untuned, rows, recipe.new_tokens, restraint, recipe)
        (recipe.story_weight * loss).backward()
        with torch.autocast(device.type, torch.bfloat16):
            kept = text_loss(model, untuned, text)
        kept.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad(set_to_none=True)
        step += 1
        if step % 25 == 0:
            plain = rows[restrained + temperature == 0, -recipe.new_tokens :]
            print(f"step {step} story {float(loss.detach()):.3f} slips {float(slips):.3f} text"
                  f" {float(kept.detach()):.3f} repeating {share_repeating(plain):.3f}", flush=True)  # fmt: skip
    save_weights(model, target / "last")
    assert load_weights(model, target / "best"), f"no step kept {recipe.highest_bpb} bits per byte"
    overshoot(model, untuned, recipe.overshoot)
    save_weights(model, target)
    narrow.load_state_dict(model.state_dict())
    log.append(
        {
            "overshoot": recipe.overshoot,
            "held_out_repeating": share_repeating(decode(probe, 200)),
            "held_out_bpb": round(bits_per_byte(model, data.held_out, data.held_out_bytes), 4),
        }
    )
    print(json.dumps(log[-1]), flush=True)
    facts = {"recipe": asdict(recipe), "steps": step, "seconds": time.perf_counter() - started, "log": log}
    (target / "anti_repeat.json").write_text(json.dumps(facts) + "\n")
