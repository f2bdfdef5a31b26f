"""The network: a Llama in plain torch whose parameter names are those of Hugging Face checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .repeats import Restraint


@dataclass(frozen=True)
class Shape:
    """Sizes of the network."""

    vocab_size: int = 4096
    hidden: int = 384
    layers: int = 6
    heads: int = 6
    kv_heads: int = 2
    intermediate: int = 1024
    context: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads


class Cache:
    """Keys and values of every layer, [layers, 2, batch, kv_heads, room, width], filled to ``length``."""

    def __init__(self, shape: Shape, batch: int, room: int, device: torch.device, dtype: torch.dtype) -> None:
        size = (shape.layers, 2, batch, shape.kv_heads, room, shape.head_dim)
        self.store = torch.zeros(size, device=device, dtype=dtype)
        self.length = 0

    def put(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add new keys and values ([batch, kv_heads, new, head_dim]); returns all up to now."""
        end = self.length + key.shape[2]
        self.store[layer, 0, :, :, self.length : end] = key
        self.store[layer, 1, :, :, self.length : end] = value
        return self.store[layer, 0, :, :, :end], self.store[layer, 1, :, :, :end]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (halves convention) of [batch, heads, time, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Norm(nn.Module):
    """Root-mean-square norm with a learned gain."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis, in float32."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        kv_size = shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv_size, bias=False)
        self.o_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, cache: Cache | None) -> Tensor:
        """[batch, time, hidden] to the same; ``cos``/``sin`` are [time, head_dim / 2]."""
        batch, time, _ = x.shape
        width = self.shape.head_dim
        query = rotate(self.q_proj(x).view(batch, time, -1, width).transpose(1, 2), cos, sin)
        key = rotate(self.k_proj(x).view(batch, time, -1, width).transpose(1, 2), cos, sin)
        value = self.v_proj(x).view(batch, time, -1, width).transpose(1, 2)
        if cache is not None:
            key, value = cache.put(layer, key, value)
        groups = self.shape.heads // self.shape.kv_heads
        key = key.repeat_interleave(groups, dim=1)
        value = value.repeat_interleave(groups, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=time > 1)
        projected: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, time, -1))
        return projected


class FeedForward(nn.Module):
    """Gated feed-forward block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] to the same."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One pre-norm transformer layer; ``dropout`` acts on what is added to the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.mlp = FeedForward(shape)
        self.dropout = 0.0

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, index: int, cache: Cache | None) -> Tensor:
        """[batch, time, hidden] to the same."""
        attended = self.self_attn(self.input_layernorm(x), cos, sin, index, cache)
        x = x + F.dropout(attended, self.dropout, self.training)
        return x + F.dropout(self.mlp(self.post_attention_layernorm(x)), self.dropout, self.training)


class Trunk(nn.Module):
    """Embedding, layers and last norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.norm_eps)


class StoryModel(nn.Module):
    """The language model; the output matrix is the embedding."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        half = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
        angles = torch.outer(torch.arange(shape.context).float(), shape.rope_theta**-half)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.reset()

    def reset(self) -> None:
        """Draw starting weights: normal, those that end on the residual stream smaller."""
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                ends = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = (2 * self.shape.layers) ** -0.5 if ends else 1.0
                nn.init.normal_(weight, std=0.02 * scale)

    def set_dropout(self, share: float) -> None:
        """Set the dropout of every layer."""
        for layer in self.model.layers:
            assert isinstance(layer, Layer)
            layer.dropout = share

    def hidden_states(self, ids: Tensor, cache: Cache | None = None) -> Tensor:
        """Token ids [batch, time] to normed states [batch, time, hidden]; a cache is extended."""
        start = cache.length if cache is not None else 0
        cos = self.cos[start : start + ids.shape[1]]
        sin = self.sin[start : start + ids.shape[1]]
        x = self.model.embed_tokens(ids)
        for index, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin, index, cache)
        if cache is not None:
            cache.length += ids.shape[1]
        states: Tensor = self.model.norm(x)
        return states

    def logits(self, states: Tensor) -> Tensor:
        """Scores of the next token, [..., vocab_size]."""
        return F.linear(states, self.model.embed_tokens.weight)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Mean next-token loss in nats of [batch, time] ids and targets."""
        scores = self.logits(self.hidden_states(ids)).float()
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())

    def token_losses(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Loss in nats of every target, [batch, time]."""
        scores = self.logits(self.hidden_states(ids)).float()
        return F.cross_entropy(scores.transpose(1, 2), targets, reduction="none")


@torch.no_grad()
def greedy(model: StoryModel, prompts: Tensor, new_tokens: int, banned: int) -> Tensor:
    """Greedy continuations of equal-length prompts [batch, time]: [batch, new_tokens], never ``banned``."""
    weight = model.model.embed_tokens.weight
    cache = Cache(model.shape, len(prompts), prompts.shape[1] + new_tokens, weight.device, weight.dtype)
    result = torch.empty(len(prompts), new_tokens, dtype=torch.long, device=prompts.device)
    feed = prompts
    for step in range(new_tokens):
        scores = model.logits(model.hidden_states(feed, cache)[:, -1])
        scores[:, banned] = -torch.inf
        feed = scores.argmax(-1, keepdim=True)
        result[:, step] = feed[:, 0]
    return result


class Decoder:
    """Continuation of a fixed number of rows, one replayed CUDA graph a token where there is a GPU.

    Greedy, unless a row is given some share of the restraint or some noise. The weights are read where they
    lie, so updating them in place needs no new decoder.
    """

    def __init__(self, model: StoryModel, batch: int, room: int, banned: int, restraint: Restraint) -> None:
        weight = model.model.embed_tokens.weight
        self.model = model
        self.banned = banned
        self.cache = Cache(model.shape, batch, room, weight.device, weight.dtype)
        self.token = torch.zeros(batch, 1, dtype=torch.long, device=weight.device)
        self.position = torch.zeros(1, dtype=torch.long, device=weight.device)
        self.slots = torch.arange(room, device=weight.device)
        self.restraint = restraint
        self.restrained = torch.zeros(batch, 1, device=weight.device)
        self.temperature = torch.zeros(batch, 1, device=weight.device)
        self.history = torch.zeros(batch, room, dtype=torch.long, device=weight.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        if weight.is_cuda:
            self._capture()

    @torch.no_grad()
    def _capture(self) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._step()

    def _attend(self, attention: Attention, x: Tensor, index: int, cos: Tensor, sin: Tensor) -> Tensor:
        """Attention of one new token a row, [batch, 1, hidden], over the slots filled so far."""
        batch, width, kv_heads = len(x), attention.shape.head_dim, attention.shape.kv_heads
        query = rotate(attention.q_proj(x).view(batch, 1, -1, width).transpose(1, 2), cos, sin)
        key = rotate(attention.k_proj(x).view(batch, 1, -1, width).transpose(1, 2), cos, sin)
        value = attention.v_proj(x).view(batch, 1, -1, width).transpose(1, 2)
        keys, values = self.cache.store[index, 0], self.cache.store[index, 1]
        keys.index_copy_(2, self.position, key)
        values.index_copy_(2, self.position, value)
        scores = (query.view(batch, kv_heads, -1, width) @ keys.mT).float() * width**-0.5
        scores = scores.masked_fill(self.slots > self.position, -torch.inf)
        mixed = scores.softmax(-1).to(values.dtype) @ values
        projected: Tensor = attention.o_proj(mixed.reshape(batch, 1, -1))
        return projected

    def _step(self) -> None:
        """Read ``token`` at ``position``, write the next token there and go one place on."""
        cos = self.model.cos.index_select(0, self.position)
        sin = self.model.sin.index_select(0, self.position)
        x = self.model.model.embed_tokens(self.token)
        for index, layer in enumerate(self.model.model.layers):
            assert isinstance(layer, Layer)
            x = x + self._attend(layer.self_attn, layer.input_layernorm(x), index, cos, sin)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        self._choose(self.model.logits(self.model.model.norm(x)[:, -1]))
        self.position.add_(1)

    def _choose(self, scores: Tensor) -> None:
        scores = scores.float() - self.restrained * self.restraint.penalty(self.history, 1)[:, 0]
        scores -= self.temperature * torch.empty_like(scores).exponential_().clamp_(min=1e-10).log()
        scores[:, self.banned] = -torch.inf
        self.token.copy_(scores.argmax(-1, keepdim=True))
        self.history.copy_(torch.cat((self.history[:, 1:], self.token), dim=1))

    @torch.no_grad()
    def __call__(
        self, prompts: Tensor, new_tokens: int, restrained: Tensor | None = None, temperature: Tensor | None = None
    ) -> Tensor:
        """Continuations [batch, new_tokens] of prompts [batch, time].

        ``restrained`` is the share of the restraint each row decodes under, ``temperature`` its noise; both [batch].
        """
        for own, given in ((self.restrained, restrained), (self.temperature, temperature)):
            own[:, 0] = 0.0 if given is None else given
        self.history.fill_(self.restraint.vocabulary)
        self.history[:, -prompts.shape[1] :] = prompts
        self.cache.length = 0
        self._choose(self.model.logits(self.model.hidden_states(prompts, self.cache)[:, -1]))
        self.position.fill_(prompts.shape[1])
        result = torch.empty(len(prompts), new_tokens, dtype=torch.long, device=prompts.device)
        result[:, 0] = self.token[:, 0]
        for step in range(1, new_tokens):
            if self.graph is not None:
                self.graph.replay()
            else:
                self._step()
            result[:, step] = self.token[:, 0]
        return result


@torch.no_grad()
def sample(
    model: StoryModel,
    prompt: Tensor,
    new_tokens: int,
    banned: int,
    temperature: float,
    top_p: float,
    seed: int,
) -> Tensor:
    """One sampled continuation of a prompt [1, time] by temperature and nucleus: [new_tokens]."""
    generator = torch.Generator().manual_seed(seed)
    weight = model.model.embed_tokens.weight
    cache = Cache(model.shape, 1, prompt.shape[1] + new_tokens, weight.device, weight.dtype)
    result: list[int] = []
    feed = prompt
    for _ in range(new_tokens):
        scores = model.logits(model.hidden_states(feed, cache)[:, -1])[0].float().cpu()
        scores[banned] = -torch.inf
        chances, order = torch.softmax(scores / temperature, -1).sort(descending=True)
        chances[chances.cumsum(-1) - chances > top_p] = 0.0
        result.append(int(order[torch.multinomial(chances, 1, generator=generator)]))
        feed = torch.tensor([[result[-1]]], device=prompt.device)
    return torch.tensor(result)
