"""TreeLSTM cells (Tai, Socher, Manning 2015, arXiv 1503.00075): binary for parse trees, child-sum for any tree.

Binary: leaves have words, inner nodes have two children. Gates in the order i, o, u, then f of the left child, f of
the right one:

    leaf: embedding.weight [vocab, input], linear.weight [3 hidden, input], linear.bias
    inner: linear.weight [5 hidden, 2 hidden], linear.bias

Child-sum: every node has a word (0 if it has none, as inner nodes of a parse tree) and any number of children:

    weight_iou [3 hidden, input + hidden], bias_iou, weight_fx [hidden, input], weight_fh [hidden, hidden], bias_f

Leaves go before inner nodes, unlike in BatchMaker. Where a worker has one call at a time, none is running when the next
is chosen, so that priority alone decides: inner nodes that go first run, in ever smaller batches, until all trees that
have begun are done, and those that come meanwhile wait, as in merged graphs. Leaves that go first cost little, and let
a tree join the batches of the others from the next call on (docs/log/cells.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from cellar.cells.cell import DEFAULT_BATCH_SIZES, Cell
from cellar.cells.graph import Graph
from cellar.cells.heads import ClassifierHead
from cellar.cells.model import CellModel
from cellar.core.errors import RequestError
from cellar.ops.linear.definition import linear
from cellar.ops.recurrent import join_rows, prepare_gates, product, tree_gates
from cellar.ops.recurrent.rows import Rows, RowsFunction, RowsOutput, landing, placed, returned


class TreeLeaf(nn.Module):
    """A word: (token) -> (h, c)."""

    def __init__(self, vocab_size: int, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.embedding = nn.Embedding(vocab_size, input_size)
        self.linear = nn.Linear(input_size, 3 * hidden_size)

    def forward(self, token: Tensor) -> tuple[Tensor, Tensor]:
        """token: [b] int64 -> h, c: [b, hidden]."""
        i, o, u = self.linear(self.embedding(token)).chunk(3, 1)
        c = i.sigmoid() * u.tanh()
        return o.sigmoid() * c.tanh(), c

    def on_rows(self, device: torch.device) -> RowsFunction:
        """The cell over rows."""
        return _leaf(self.embedding.weight.detach(), self.linear.weight.detach(), self.linear.bias.detach(), device)


class TreeInner(nn.Module):
    """A node with two children: (h_left, h_right, c_left, c_right) -> (h, c)."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.linear = nn.Linear(2 * hidden_size, 5 * hidden_size)

    def forward(self, h_left: Tensor, h_right: Tensor, c_left: Tensor, c_right: Tensor) -> tuple[Tensor, Tensor]:
        """All [b, hidden] -> h, c: [b, hidden]."""
        i, o, u, left, right = self.linear(torch.cat((h_left, h_right), 1)).chunk(5, 1)
        c = i.sigmoid() * u.tanh() + left.sigmoid() * c_left + right.sigmoid() * c_right
        return o.sigmoid() * c.tanh(), c

    def on_rows(self, device: torch.device) -> RowsFunction:
        """The cell over rows."""
        weight, bias = placed(self.linear.weight, device), self.linear.bias.detach().to(device)
        hidden, on_cpu = self.hidden_size, device.type == "cpu"
        prepare_gates("tree_gates", device, self.linear.weight.dtype)

        def both(left: Rows, right: Rows) -> Tensor:
            if on_cpu and left.table is right.table:  # one gather costs half as much as two
                index = torch.stack((left.index, right.index), 1).view(-1)
                return left.table.index_select(0, index).view(-1, 2 * hidden)
            return join_rows((left.table, right.table), (left.index, right.index))

        def step(sources: Sequence[Rows], targets: Sequence[Rows | None]) -> RowsOutput:
            left, right, c_left, c_right = sources
            gates, rest = product(both(left, right), weight, bias)
            h, c = landing(targets[0], left, left.index), landing(targets[1], c_left, left.index)
            iou, forget = gates[:, : 3 * hidden], gates[:, 3 * hidden :]
            children = torch.stack((c_left.index, c_right.index)).t()
            biases = (None, None) if rest is None else (rest[: 3 * hidden], rest[3 * hidden :])
            finite = tree_gates(iou, forget, c_left.table, children, h.table, h.index, c.table, c.index, *biases)
            return RowsOutput(finite, returned(targets, (h, c)))

        return step


class ChildSumNode(nn.Module):
    """A node with up to `max_children` children: (token, h1 .. hk, c1 .. ck) -> (h, c); absent ones are zeros."""

    def __init__(self, vocab_size: int, input_size: int, hidden_size: int, max_children: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.max_children = max_children
        self.embedding = nn.Embedding(vocab_size, input_size)
        bound = 1 / math.sqrt(hidden_size)
        self.weight_iou = _uniform(bound, 3 * hidden_size, input_size + hidden_size)
        self.bias_iou = _uniform(bound, 3 * hidden_size)
        self.weight_fx = _uniform(bound, hidden_size, input_size)
        self.weight_fh = _uniform(bound, hidden_size, hidden_size)
        self.bias_f = _uniform(bound, hidden_size)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs, in order."""
        children = range(1, self.max_children + 1)
        return ("token", *(f"h{k}" for k in children), *(f"c{k}" for k in children))

    def forward(self, token: Tensor, *states: Tensor) -> tuple[Tensor, Tensor]:
        """token: [b] int64; states: all h, then all c, [b, hidden] -> h, c: [b, hidden]."""
        h = torch.stack(states[: self.max_children], 1)
        c = torch.stack(states[self.max_children :], 1)
        x = self.embedding(token)
        gates = functional.linear(torch.cat((x, h.sum(1)), 1), self.weight_iou, self.bias_iou)
        i, o, u = gates.chunk(3, 1)
        from_word = functional.linear(x, self.weight_fx, self.bias_f)
        kept = (functional.linear(h, self.weight_fh) + from_word[:, None]).sigmoid()
        new = i.sigmoid() * u.tanh() + (kept * c).sum(1)
        return o.sigmoid() * new.tanh(), new

    def on_rows(self, device: torch.device) -> RowsFunction:
        """The cell over rows: the children of a batch are one batch of the product that makes their forget gates."""
        children = self.max_children
        prepare_gates("tree_gates", device, self.weight_iou.dtype)
        words, bias_iou, bias_f = (
            tensor.detach().to(device) for tensor in (self.embedding.weight, self.bias_iou, self.bias_f)
        )
        weight_iou, weight_fx, weight_fh = (
            placed(tensor, device) for tensor in (self.weight_iou, self.weight_fx, self.weight_fh)
        )

        def step(sources: Sequence[Rows], targets: Sequence[Rows | None]) -> RowsOutput:
            hs, cs = sources[1 : children + 1], sources[children + 1 :]
            x = join_rows((words,), (sources[0].gather(),))
            h_index = torch.stack([rows.index for rows in hs], 1)
            h = join_rows((hs[0].table,), (h_index.view(-1),))
            batch = len(x)
            gates, rest = product(torch.cat((x, h.view(batch, children, -1).sum(1)), 1), weight_iou, bias_iou)
            forget = linear(h, weight_fh).view(batch, children, -1) + linear(x, weight_fx, bias_f)[:, None]
            c_index = torch.stack([rows.index for rows in cs]).t()
            landed = landing(targets[0], hs[0], hs[0].index), landing(targets[1], cs[0], cs[0].index)
            h_out, c_out = landed
            places = h_out.table, h_out.index, c_out.table, c_out.index
            finite = tree_gates(gates, forget.view(batch, -1), cs[0].table, c_index, *places, rest)
            return RowsOutput(finite, returned(targets, landed))

        return step


class ChildSumLeaf(nn.Module):
    """A node without children, of the same parameters as the others: (token) -> (h, c)."""

    def __init__(self, node: ChildSumNode) -> None:
        super().__init__()
        self.node = node

    def forward(self, token: Tensor) -> tuple[Tensor, Tensor]:
        """token: [b] int64 -> h, c: [b, hidden]."""
        node = self.node
        x = node.embedding(token)
        i, o, u = functional.linear(x, node.weight_iou[:, : x.shape[1]], node.bias_iou).chunk(3, 1)
        c = i.sigmoid() * u.tanh()
        return o.sigmoid() * c.tanh(), c

    def on_rows(self, device: torch.device) -> RowsFunction:
        """The cell over rows."""
        node = self.node
        words = node.embedding.weight.detach()
        return _leaf(words, node.weight_iou.detach()[:, : words.shape[1]], node.bias_iou.detach(), device)


def _leaf(words: Tensor, weight: Tensor, bias: Tensor, device: torch.device) -> RowsFunction:
    """A leaf over rows: gates of its word, and no child. words: [vocab, input]; weight: [3 hidden, input]."""
    words, bias = words.to(device), bias.to(device)
    prepare_gates("tree_gates", device, weight.dtype)
    packed = placed(weight.contiguous(), device)
    # A table of states to take the shape from.
    like = words.new_empty((1, len(bias) // 3))

    def step(sources: Sequence[Rows], targets: Sequence[Rows | None]) -> RowsOutput:
        token = sources[0].gather()
        gates, rest = product(join_rows((words,), (token,)), packed, bias)
        h, c = landed = [landing(target, Rows(like, token), token) for target in targets]
        none = token.new_empty((len(token), 0))
        finite = tree_gates(gates, gates[:, :0], c.table, none, h.table, h.index, c.table, c.index, rest)
        return RowsOutput(finite, returned(targets, landed))

    return step


def _uniform(bound: float, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))


def tree_classifier(
    leaf: TreeLeaf,
    inner: TreeInner,
    head: ClassifierHead,
    *,
    name: str = "tree_classifier",
    batch_sizes: Sequence[int] = DEFAULT_BATCH_SIZES,
) -> CellModel:
    """{tokens, children} -> {label, logits} of the root, the last node.

    Leaves are nodes 0 .. n - 1 and have a token each; children[k] are the two children of node n + k.
    """
    leaves = Cell(
        "leaf",
        leaf,
        ("h", "c"),
        priority=1,
        batch_sizes=tuple(batch_sizes),
        high={"token": leaf.embedding.num_embeddings},
    )
    nodes = Cell("inner", inner, ("h", "c"), batch_sizes=tuple(batch_sizes))
    last = Cell("head", head, ("label", "logits"), priority=2)
    wires = ({"h_left": "h", "c_left": "c"}, {"h_right": "h", "c_right": "c"})

    def unfold(graph: Graph, tokens: list[int], children: list[list[int]]) -> dict[str, object]:
        table = np.array(children, np.int64).reshape(-1, 2)
        tree = graph.tree(leaves, nodes, leaves={"token": tokens}, children=table, wires=wires)
        answer = graph.call(last, h=tree.node(-1)["h"])
        return {"label": answer["label"], "logits": answer["logits"]}

    return CellModel(name, [leaves, nodes, last], unfold, {"tokens": [0, 0, 0], "children": [[0, 1], [3, 2]]})


def child_sum_classifier(
    node: ChildSumNode,
    head: ClassifierHead,
    *,
    name: str = "child_sum_classifier",
    batch_sizes: Sequence[int] = DEFAULT_BATCH_SIZES,
) -> CellModel:
    """{tokens, parents} -> {label, logits} of a dependency tree's root: parents[k] is the head of word k, -1 its own.

    Raises RequestError if a word has more children than the node takes.
    """
    most = node.max_children
    words = node.embedding.num_embeddings
    leaves = Cell(
        "leaf", ChildSumLeaf(node), ("h", "c"), priority=1, batch_sizes=tuple(batch_sizes), high={"token": words}
    )
    nodes = Cell(
        "node",
        node,
        ("h", "c"),
        batch_sizes=tuple(batch_sizes),
        inputs=node.inputs,
        shapes=dict.fromkeys(node.inputs[1:], (node.hidden_size,)),
        high={"token": words},
    )
    last = Cell("head", head, ("label", "logits"), priority=2)
    wires = [{f"h{k}": "h", f"c{k}": "c"} for k in range(1, most + 1)]

    def unfold(graph: Graph, tokens: list[int], parents: list[int]) -> dict[str, object]:
        order, children = _by_leaves(parents, most, len(tokens))
        count = len(tokens) - len(children)
        tree = graph.tree(
            leaves,
            nodes,
            leaves={"token": [tokens[k] for k in order[:count]]},
            each={"token": [tokens[k] for k in order[count:]]} if len(children) else None,
            children=children,
            wires=wires,
        )
        answer = graph.call(last, h=tree.node(order.index(parents.index(-1)))["h"])
        return {"label": answer["label"], "logits": answer["logits"]}

    return CellModel(name, [leaves, nodes, last], unfold, {"tokens": [0, 0, 0], "parents": [1, -1, 1]})


def _by_leaves(parents: Sequence[int], most: int, num_tokens: int) -> tuple[list[int], np.ndarray[Any, Any]]:
    """The words in the order leaves, then the others; and of the others the children [m, most], -1 for none."""
    if len(parents) != num_tokens or list(parents).count(-1) != 1 or not all(-1 <= p < num_tokens for p in parents):
        raise RequestError(
            f"parents must have one entry per token, a number below {num_tokens}, and -1 for one of them.", "parents"
        )
    children: list[list[int]] = [[] for _ in parents]
    for k, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(k)
    widest = max(len(own) for own in children)
    if widest > most:
        raise RequestError(f"a word has {widest} children, but this model takes {most} at most.", "parents")
    order = [k for k, own in enumerate(children) if not own] + [k for k, own in enumerate(children) if own]
    place = {k: n for n, k in enumerate(order)}
    rows = [[place[child] for child in children[k]] for k in order if children[k]]
    return order, np.array([row + [-1] * (most - len(row)) for row in rows], np.int64).reshape(-1, most)
