"""The built-in models through scheduler, engine and LocalRuntime against torch.nn, a recursion, and step by step.

Requests join and leave all the time: small batches, several tasks a call, one or two workers, arrivals between turns.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cellar.cells import Cell, CellModel, Graph
from cellar.cells.gru import GRUCell, TokenGRUCell
from cellar.cells.heads import ClassifierHead, ScoreHead
from cellar.cells.lstm import LSTMCell, TokenLSTMCell
from cellar.cells.seq2seq import DecoderCell, language_model, translator
from cellar.cells.sequence import classifier, scorer, state_shapes
from cellar.cells.tree_lstm import (
    ChildSumNode,
    TreeInner,
    TreeLeaf,
    child_sum_classifier,
    tree_classifier,
)
from cellar.core.cell_graphs import CellConfig
from cellar.core.errors import RequestError
from cellar.engine.cells import CellEngine
from cellar.runtime.cells.local import LocalCellRuntime

VOCAB, INPUT, HIDDEN, CLASSES = 40, 10, 16, 3
SIZES = (1, 2, 4, 7)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def engine(models: Sequence[CellModel], workers: int = 1, max_tasks: int = 3) -> CellEngine:
    runtime = LocalCellRuntime([m.spec for m in models], [m.modules for m in models], ["cpu"] * workers, num_threads=1)
    return CellEngine(models, runtime, CellConfig(max_tasks=max_tasks))


def serve(model: CellModel, requests: Sequence[dict[str, Any]], workers: int = 1) -> list[Any]:
    """Responses of requests that arrive while others run."""
    shuffle = random.Random(1)
    with engine([model], workers) as running:
        waiting = list(enumerate(requests))
        futures: dict[int, Any] = {}
        while waiting or running.engine.has_work():
            for _ in range(shuffle.choice((0, 1, 2, 5))):
                if waiting:
                    k, fields = waiting.pop(0)
                    futures[k] = running.submit(model.name, fields)
            if running.engine.has_work():
                running.front.turn()
        running.scheduler.check_integrity()
        return [futures[k].result(0) for k in range(len(requests))]


def sentences(count: int, longest: int = 25) -> list[list[int]]:
    shuffle = random.Random(0)
    return [[shuffle.randrange(VOCAB) for _ in range(shuffle.randint(1, longest))] for _ in range(count)]


def nn_states(rnn: nn.LSTM | nn.GRU, words: nn.Embedding, tokens: list[int]) -> tuple[Tensor, Any]:
    with torch.inference_mode():
        output, state = rnn(words(torch.tensor([tokens])))
    return output[0], state


def recurrent(kind: str, layers: int) -> tuple[Any, nn.LSTM | nn.GRU]:
    """A cell, and torch's module with the same weights."""
    ours, theirs = {"lstm": (TokenLSTMCell, nn.LSTM), "gru": (TokenGRUCell, nn.GRU)}[kind]
    rnn = theirs(INPUT, HIDDEN, layers, batch_first=True)
    cell = ours(VOCAB, INPUT, HIDDEN, layers)
    cell.load_state_dict(rnn.state_dict(), strict=False)
    return cell, rnn


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_classifier_as_torch_nn(kind: str, layers: int, workers: int) -> None:
    cell, rnn = recurrent(kind, layers)
    head = ClassifierHead(HIDDEN, CLASSES)
    requests = sentences(30)
    answers = serve(classifier(cell, head, batch_sizes=SIZES), [{"tokens": tokens} for tokens in requests], workers)
    for tokens, answer in zip(requests, answers, strict=True):
        output, _ = nn_states(rnn, cell.embedding, tokens)
        with torch.inference_mode():
            logits = nn.functional.linear(output[-1], head.weight, head.bias)
        np.testing.assert_allclose(answer["logits"], logits, atol=1e-5, rtol=1e-5)
        assert answer["label"] == int(logits.argmax())


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_scores_of_every_token(kind: str) -> None:
    cell, rnn = recurrent(kind, 1)
    head = ScoreHead(HIDDEN, VOCAB)
    requests = [tokens for tokens in sentences(20) if len(tokens) > 1]
    answers = serve(scorer(cell, head, batch_sizes=SIZES), [{"tokens": tokens} for tokens in requests])
    for tokens, answer in zip(requests, answers, strict=True):
        output, _ = nn_states(rnn, cell.embedding, tokens[:-1])
        with torch.inference_mode():
            scores = nn.functional.linear(output, head.weight, head.bias).log_softmax(1)
        wanted = scores[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])]
        np.testing.assert_allclose(np.stack(answer["logprobs"]), wanted, atol=1e-5, rtol=1e-5)


def decode(cell: DecoderCell, token: int, h: Tensor, c: Tensor, stop: int, limit: int) -> list[int]:
    """A decoder step by step, with torch.nn.LSTM inside."""
    rnn = nn.LSTM(INPUT, HIDDEN, cell.num_layers)
    rnn.load_state_dict({name: value for name, value in cell.state_dict().items() if "_l" in name})
    found: list[int] = []
    with torch.inference_mode():
        while len(found) < limit:
            output, (h, c) = rnn(cell.embedding(torch.tensor([token]))[None], (h, c))
            token = int(cell.output(output[-1, 0]).argmax())
            if token == stop:
                break
            found.append(token)
    return found


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("layers", [1, 2])
def test_translator_step_by_step(layers: int, workers: int) -> None:
    encoder, rnn = recurrent("lstm", layers)
    decoder = DecoderCell(VOCAB, INPUT, HIDDEN, layers)
    with torch.no_grad():
        decoder.output.weight.mul_(8)  # so that no two logits are nearly equal
    start, limit = 1, 20
    requests = sentences(25)
    states = [nn_states(rnn, encoder.embedding, tokens)[1] for tokens in requests]
    endless = [decode(decoder, start, *state, -1, limit) for state in states]
    # The symbol that ends most of them at different steps.
    ends = {token: {said.index(token) for said in endless if token in said} for token in range(VOCAB)}
    stop = max(ends, key=lambda token: len(ends[token]))
    assert len(ends[stop]) > 2
    model = translator(
        encoder, decoder, start, stop, max_tokens=limit, encoder_batch_sizes=SIZES, decoder_batch_sizes=(2, 3)
    )
    answers = serve(model, [{"tokens": tokens} for tokens in requests], workers)
    for state, answer in zip(states, answers, strict=True):
        assert [int(token) for token in answer["tokens"]] == decode(decoder, start, *state, stop, limit)


def test_language_model_step_by_step() -> None:
    decoder = DecoderCell(VOCAB, INPUT, HIDDEN)
    with torch.no_grad():
        decoder.output.weight.mul_(8)
    model = language_model(decoder, stop=2, max_tokens=20, prompt_batch_sizes=SIZES, batch_sizes=(1, 3))
    requests = [{"tokens": tokens, "max_tokens": 1 + k} for k, tokens in enumerate(sentences(20, 8))]
    answers = serve(model, requests)
    rnn = nn.LSTM(INPUT, HIDDEN, batch_first=True)
    rnn.load_state_dict({name: value for name, value in decoder.state_dict().items() if "_l" in name})
    for fields, answer in zip(requests, answers, strict=True):
        h = c = torch.zeros(1, 1, HIDDEN)
        if len(fields["tokens"]) > 1:
            _, (h, c) = nn_states(rnn, decoder.embedding, fields["tokens"][:-1])
        wanted = decode(decoder, fields["tokens"][-1], h, c, 2, fields["max_tokens"])
        assert [int(token) for token in answer["tokens"]] == wanted
    with pytest.raises(RequestError, match="max_tokens is 21"):
        model.unfold({"tokens": [1], "max_tokens": 21})
    with pytest.raises(RequestError, match="no tokens"):
        model.unfold({"tokens": []})


def random_tree(leaves: int, shuffle: random.Random) -> list[list[int]]:
    """Children of the inner nodes; the last is the root."""
    roots = list(range(leaves))
    children = []
    while len(roots) > 1:
        pair = [roots.pop(shuffle.randrange(len(roots))) for _ in range(2)]
        children.append(pair)
        roots.append(leaves + len(children) - 1)
    return children


@pytest.mark.parametrize("workers", [1, 2])
def test_tree_as_a_recursion(workers: int) -> None:
    leaf, inner, head = TreeLeaf(VOCAB, INPUT, HIDDEN), TreeInner(HIDDEN), ClassifierHead(HIDDEN, CLASSES)
    shuffle = random.Random(3)
    requests = [{"tokens": tokens, "children": random_tree(len(tokens), shuffle)} for tokens in sentences(25, 16)]
    answers = serve(tree_classifier(leaf, inner, head, batch_sizes=SIZES), requests, workers)

    def states(fields: dict[str, Any], node: int) -> tuple[Tensor, Tensor]:
        tokens = fields["tokens"]
        if node < len(tokens):
            return leaf(torch.tensor([tokens[node]]))
        left, right = (states(fields, child) for child in fields["children"][node - len(tokens)])
        return inner(left[0], right[0], left[1], right[1])

    for fields, answer in zip(requests, answers, strict=True):
        with torch.inference_mode():
            h, _ = states(fields, len(fields["tokens"]) + len(fields["children"]) - 1)
            _, logits = head(h)
        np.testing.assert_allclose(answer["logits"], logits[0], atol=1e-5, rtol=1e-5)


def test_child_sum_as_a_recursion() -> None:
    node, head = ChildSumNode(VOCAB, INPUT, HIDDEN, 4), ClassifierHead(HIDDEN, CLASSES)
    model = child_sum_classifier(node, head, batch_sizes=SIZES)
    shuffle = random.Random(3)
    requests = []
    for tokens in sentences(25, 12):
        parents = [-1]
        for k in range(1, len(tokens)):
            room = [p for p in range(k) if parents.count(p) < 4]
            parents.append(shuffle.choice(room))
        requests.append({"tokens": tokens, "parents": parents})
    answers = serve(model, requests)

    def states(fields: dict[str, Any], k: int) -> tuple[Tensor, Tensor]:
        """Equations 2-8, with sums over the children that there are."""
        own = [states(fields, child) for child, parent in enumerate(fields["parents"]) if parent == k]
        x = node.embedding.weight[fields["tokens"][k]]
        total = sum((h for h, _ in own), torch.zeros(HIDDEN))
        i, o, u = (node.weight_iou @ torch.cat((x, total)) + node.bias_iou).chunk(3)
        c = i.sigmoid() * u.tanh()
        for h_k, c_k in own:
            c = c + (node.weight_fx @ x + node.weight_fh @ h_k + node.bias_f).sigmoid() * c_k
        return o.sigmoid() * c.tanh(), c

    for fields, answer in zip(requests, answers, strict=True):
        with torch.inference_mode():
            logits = head(states(fields, 0)[0][None])[1]
        np.testing.assert_allclose(answer["logits"], logits[0], atol=1e-5, rtol=1e-5)

    for parents, message in (([1, 0], "-1 for one"), ([-1], "one entry per token"), ([-1, 5], "below 2")):
        with pytest.raises(RequestError, match=message):
            model.unfold({"tokens": [1, 2], "parents": parents})
    with pytest.raises(RequestError, match="5 children"):
        model.unfold({"tokens": [0] * 6, "parents": [-1] + [0] * 5})
    with pytest.raises(RequestError, match="cycle"):
        model.unfold({"tokens": [0] * 3, "parents": [-1, 2, 1]})


@pytest.mark.parametrize("make", [LSTMCell, GRUCell])
def test_features_in_place_of_tokens(make: Callable[..., Any]) -> None:
    """A cell over features, and an answer that is the states of all steps."""

    cell = make(INPUT, HIDDEN)
    rnn = (nn.LSTM if make is LSTMCell else nn.GRU)(INPUT, HIDDEN, batch_first=True)
    rnn.load_state_dict(cell.state_dict())
    outputs = ("h", "c") if make is LSTMCell else ("h",)
    step = Cell("step", cell, outputs, batch_sizes=SIZES, shapes=state_shapes(cell))

    def unfold(graph: Graph, x: list[list[float]]) -> Any:
        return graph.chain(step, len(x), each={"x": x}, carry={name: name for name in outputs})["h"]

    model = CellModel("features", [step], unfold, {"x": [[0.0] * INPUT] * 2})
    requests = [{"x": torch.randn(k + 1, INPUT).tolist()} for k in range(8)]
    for fields, answer in zip(requests, serve(model, requests), strict=True):
        with torch.inference_mode():
            wanted = rnn(torch.tensor([fields["x"]]))[0][0]
        np.testing.assert_allclose(np.stack(answer), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["lstm", "gru", "tree"])
def test_an_answer_does_not_depend_on_the_company(kind: str) -> None:
    """Bit for bit: alone, all at once, and as they come."""
    head = ClassifierHead(HIDDEN, CLASSES)
    requests: list[dict[str, Any]] = [{"tokens": tokens} for tokens in sentences(15)]
    if kind == "tree":
        model = tree_classifier(TreeLeaf(VOCAB, INPUT, HIDDEN), TreeInner(HIDDEN), head, batch_sizes=(1, 64))
        shuffle = random.Random(3)
        for fields in requests:
            fields["children"] = random_tree(len(fields["tokens"]), shuffle)
    else:
        model = classifier(recurrent(kind, 1)[0], head, batch_sizes=(1, 64))
    with engine([model]) as running:
        alone = [running.run(model.name, [fields])[0]["logits"] for fields in requests]
        together = [answer["logits"] for answer in running.run(model.name, requests)]
    apart = [answer["logits"] for answer in serve(model, requests)]
    for first, second, third in zip(alone, together, apart, strict=True):
        assert np.array_equal(first, second)
        assert np.array_equal(first, third)


def test_a_state_that_is_not_finite_fails_its_request_alone() -> None:
    cell, _ = recurrent("lstm", 1)
    with torch.no_grad():
        cell.embedding.weight[7] = torch.nan
    model = classifier(cell, ClassifierHead(HIDDEN, CLASSES), batch_sizes=SIZES)
    good = [{"tokens": [token for token in tokens if token != 7] or [1]} for tokens in sentences(12)]
    with engine([model]) as running:
        before = running.run(model.name, good)
        mixed = [*good[:5], {"tokens": [1, 2, 7, 3]}, *good[5:], {"tokens": [7]}]
        after = running.run(model.name, mixed, raise_errors=False)
        assert isinstance(after[5], RequestError)
        assert isinstance(after[-1], RequestError)
        assert "finite" in str(after[5])
        for one, other in zip(before, after[:5] + after[6:-1], strict=True):
            assert np.array_equal(one["logits"], other["logits"])
        running.scheduler.check_integrity()
