"""Optimisers: Muon (orthogonalised momentum) for the matrices inside layers, AdamW for the rest."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn


def orthogonalise(batch: Tensor, steps: int = 5) -> Tensor:
    """Nearly orthogonal matrices of the same row and column spaces, [n, rows, columns], by Newton-Schulz."""
    x: Tensor = batch.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


class Muon:
    """Muon with Nesterov momentum and decoupled weight decay; equal shapes are updated as one batch."""

    def __init__(self, weights: list[nn.Parameter], momentum: float, decay: float) -> None:
        self.momentum = momentum
        self.decay = decay
        self.groups: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        for weight in weights:
            self.groups[tuple(weight.shape)].append(weight)
        self.buffers = {
            shape: torch.zeros((len(group), *shape), device=group[0].device) for shape, group in self.groups.items()
        }

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update with learning rate ``rate`` from the weights' gradients."""
        for shape, group in self.groups.items():
            gradient = torch.stack([weight.grad for weight in group if weight.grad is not None])
            buffer = self.buffers[shape]
            buffer.lerp_(gradient, 1 - self.momentum)
            update = orthogonalise(gradient.lerp(buffer, self.momentum)).float()
            scale = max(1.0, shape[0] / shape[1]) ** 0.5
            tensors: list[Tensor] = [weight.data for weight in group]
            torch._foreach_mul_(tensors, 1 - rate * self.decay)
            torch._foreach_add_(tensors, list(update.unbind()), alpha=-rate * scale)


class Optimiser:
    """Both optimisers over one model; the rate of AdamW follows that of Muon in proportion."""

    def __init__(self, model: nn.Module, rate: float, adam_rate: float, decay: float) -> None:
        self.rate = rate
        self.adam_rate = adam_rate
        named = list(model.named_parameters())
        inner = [weight for name, weight in named if weight.ndim == 2 and "layers" in name]
        rest = [weight for name, weight in named if not (weight.ndim == 2 and "layers" in name)]
        self.muon = Muon(inner, momentum=0.95, decay=decay)
        fused = rest[0].is_cuda
        self.adam = torch.optim.AdamW(rest, lr=adam_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)

    def step(self, scale: float) -> None:
        """One update at ``scale`` times the full rates; clears the gradients."""
        for group in self.adam.param_groups:
            group["lr"] = self.adam_rate * scale
        self.adam.step()
        self.muon.step(self.rate * scale)
        self.adam.zero_grad(set_to_none=True)
        for weights in self.muon.groups.values():
            for weight in weights:
                weight.grad = None

    def state(self) -> dict[str, object]:
        """Everything needed to go on, for ``torch.save``."""
        return {"adam": self.adam.state_dict(), "muon": list(self.muon.buffers.values())}

    def load(self, state: dict[str, object]) -> None:
        """Take up a state written by ``state``."""
        adam, muon = state["adam"], state["muon"]
        assert isinstance(adam, dict)
        assert isinstance(muon, list)
        self.adam.load_state_dict(adam)
        for buffer, saved in zip(self.muon.buffers.values(), muon, strict=True):
            buffer.copy_(saved)
