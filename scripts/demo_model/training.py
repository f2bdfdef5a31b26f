"""Language-model training with a state on disk, and the held-out measure."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .network import Shape, StoryModel
from .optim import Optimiser
from .text import END_ID

PART_BYTES = 15_000_000


@dataclass
class Progress:
    """Where training stands; written to progress.json."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    log: list[dict[str, float]] = field(default_factory=list)


class Data:
    """The token arrays of a work folder, on the training device."""

    def __init__(self, work: Path, device: torch.device) -> None:
        self.device = device
        self.children = self._load(work / "children.npy")
        self.books = self._load(work / "books.npy")
        self.held_out = self._load(work / "heldout.npy")
        facts = json.loads((work / "facts.json").read_text())
        self.held_out_bytes = int(facts["sizes"]["heldout"]["bytes"])

    def _load(self, path: Path) -> Tensor:
        return torch.from_numpy(np.load(path).astype(np.int32)).to(self.device)

    def batch(self, rng: np.random.Generator, size: int, length: int, children: float) -> Tensor:
        """Random windows [size, length + 1], a share ``children`` of them from the children's file."""
        from_children = round(size * children)
        span = torch.arange(length + 1, device=self.device)
        parts = []
        for stream, count in ((self.children, from_children), (self.books, size - from_children)):
            if count:
                starts = torch.from_numpy(rng.integers(0, len(stream) - length - 1, count)).to(self.device)
                parts.append(stream[starts[:, None] + span])
        return torch.cat(parts).long()


def save_weights(model: StoryModel, folder: Path) -> None:
    """Write the float32 weights in parts of less than 16 MB."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(split_parts(dict(model.state_dict()), PART_BYTES)):
        on_cpu = {name: value.detach().cpu().contiguous() for name, value in part.items()}
        save_file(on_cpu, folder / f"weights-{number}.st")


def split_parts(tensors: dict[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    """Tensors in order, in as few runs as fit ``limit`` bytes each."""
    parts: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if used + size > limit and parts[-1]:
            parts.append({})
            used = 0
        parts[-1][name] = tensor
        used += size
    return parts


def load_weights(model: StoryModel, folder: Path) -> bool:
    """Take up weights written by ``save_weights``; False if there are none."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("weights-*.st")):
        tensors.update(load_file(path))
    if tensors:
        model.load_state_dict(tensors)
    return bool(tensors)


def windows(documents: list[Tensor], length: int, stride: int) -> list[tuple[Tensor, int]]:
    """Windows of at most ``length`` + 1 tokens over each document, with where the new targets start."""
    result = []
    for document in documents:
        done = 0
        while done < len(document) - 1:
            start = max(0, min(done, done - (length - stride)))
            piece = document[start : start + length + 1]
            result.append((piece, done - start))
            done = start + len(piece) - 1
    return result


@torch.no_grad()
def bits_per_byte(model: StoryModel, stream: Tensor, text_bytes: int, precise: bool = False) -> float:
    """Held-out bits per UTF-8 byte: windows of the context; targets after the first see half of it."""
    ends = [*torch.nonzero(stream == END_ID).flatten().tolist(), len(stream)]
    documents = [stream[a:b].long() for a, b in pairwise(ends)]
    length = model.shape.context
    nats = 0.0
    model.eval()
    for piece, new in windows(documents, length, length // 2):
        with torch.autocast(stream.device.type, torch.bfloat16, enabled=not precise):
            losses = model.token_losses(piece[None, :-1], piece[None, 1:])
        nats += float(losses[0, new:].double().sum())
    model.train()
    return nats / math.log(2) / text_bytes


def rate_scale(done: float, warm_up: float, decay_share: float) -> float:
    """Share of the full learning rate at ``done`` (0 to 1): warm-up, constant, then linear to zero."""
    if done < warm_up:
        return max(done / warm_up, 0.01)
    return min(1.0, max(0.0, (1.0 - done) / decay_share))


@dataclass(frozen=True)
class Recipe:
    """How to train."""

    tokens: int = 420_000_000
    batch: int = 64
    rate: float = 0.02
    adam_rate: float = 0.004
    weight_decay: float = 0.1
    dropout: float = 0.15
    decay_share: float = 0.4
    children: float = 0.3
    children_late: float = 0.35
    evaluate_every: int = 200
    seed: int = 20261121


def train(work: Path, state: Path, shape: Shape, recipe: Recipe, minutes: float, device: torch.device) -> Progress:
    """Train for at most ``minutes`` or to the end of the recipe, going on from ``state`` if it holds one."""
    started = time.perf_counter()
    torch.manual_seed(recipe.seed)
    torch.set_float32_matmul_precision("high")
    data = Data(work, device)
    model = StoryModel(shape).to(device)
    optimiser = Optimiser(model, recipe.rate, recipe.adam_rate, recipe.weight_decay)
    progress = Progress()
    if load_weights(model, state):
        progress = Progress(**json.loads((state / "progress.json").read_text()))
        if (state / "optimiser.pt").exists():
            optimiser.load(torch.load(state / "optimiser.pt", map_location=device))
    compiled = torch.compile(model) if device.type == "cuda" else model
    per_step = recipe.batch * shape.context
    steps = recipe.tokens // per_step
    before, first = progress.seconds, progress.step
    mark, mark_step, running = time.perf_counter(), first, torch.zeros((), device=device)
    model.set_dropout(recipe.dropout)
    while progress.step < steps and time.perf_counter() - started < minutes * 60:
        done = progress.step / steps
        late = done >= 1 - recipe.decay_share
        rng = np.random.default_rng([recipe.seed, progress.step])
        share = recipe.children_late if late else recipe.children
        ids = data.batch(rng, recipe.batch, shape.context, share)
        scale = rate_scale(done, 0.03, recipe.decay_share)
        for piece in ids.split(32):  # type: ignore[no-untyped-call]
            with torch.autocast(device.type, torch.bfloat16):
                loss = compiled(piece[:, :-1], piece[:, 1:])
            (loss * len(piece) / len(ids)).backward()
            running += loss.detach() * len(piece) / len(ids)
        optimiser.step(scale)
        progress.step += 1
        progress.tokens += per_step
        if progress.step % 50 == 0 or progress.step == first + 10:
            mean = float(running) / (progress.step - mark_step)
            now = time.perf_counter()
            speed = per_step * (progress.step - mark_step) / (now - mark)
            entry = {"step": progress.step, "loss": round(mean, 4), "tokens_per_s": round(speed)}
            if progress.step % recipe.evaluate_every == 0:
                entry["held_out_bpb"] = round(bits_per_byte(model, data.held_out, data.held_out_bytes), 4)
                seen = data.children[: len(data.held_out)]
                entry["trained_nats"] = round(mean_nats(model, seen), 4)
                entry["held_out_nats"] = round(mean_nats(model, data.held_out), 4)
            print(json.dumps(entry), f"of {steps}, {now - started:.0f} s", flush=True)
            progress.log.append(entry)
            running.zero_()
            mark, mark_step = time.perf_counter(), progress.step
    progress.seconds = before + time.perf_counter() - started
    save_weights(model, state)
    torch.save(optimiser.state(), state / "optimiser.pt")
    (state / "progress.json").write_text(json.dumps(asdict(progress)) + "\n")
    return progress


@torch.no_grad()
def mean_nats(model: StoryModel, stream: Tensor) -> float:
    """Mean loss per token over a stream cut into plain windows, to compare seen with unseen text."""
    length = model.shape.context
    count = (len(stream) - 1) // length
    total = 0.0
    model.eval()
    for start in range(0, count * length, length):
        piece = stream[start : start + length + 1].long()[None]
        with torch.autocast(stream.device.type, torch.bfloat16):
            total += float(model.token_losses(piece[:, :-1], piece[:, 1:]).mean())
    model.train()
    return total / count
