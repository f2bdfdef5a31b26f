"""Weights of cells from safetensors, from torch's state dicts, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from cellar.cells.gru import GRUCell, TokenGRUCell
from cellar.cells.lstm import LSTMCell, TokenLSTMCell
from cellar.cells.weights import load_weights
from cellar.core.errors import CheckpointError


def same(cell: nn.Module, theirs: nn.Module) -> None:
    for name, value in theirs.state_dict().items():
        assert torch.equal(cell.state_dict()[name], value)


@pytest.mark.parametrize("kind", ["safetensors", "torch", "mapping"])
@pytest.mark.parametrize(("ours", "theirs"), [(LSTMCell, nn.LSTM), (GRUCell, nn.GRU)])
def test_of_torchs_modules(tmp_path: Path, kind: str, ours: type, theirs: type) -> None:
    module, cell = theirs(4, 6, 2), ours(4, 6, 2)
    source: object = module.state_dict()
    if kind == "safetensors":
        source = tmp_path / "weights.safetensors"
        save_file(module.state_dict(), source)
    elif kind == "torch":
        source = str(tmp_path / "weights.pt")
        torch.save(module.state_dict(), source)
    load_weights(cell, source)  # type: ignore[arg-type]
    same(cell, module)


def test_names_of_a_whole_model() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(9, 4)
            self.rnn = nn.LSTM(4, 6)
            self.other = nn.GRU(4, 6, bidirectional=True)

    model = nn.ModuleDict({"encoder": Encoder()})
    cell = TokenLSTMCell(9, 4, 6)
    load_weights(cell, model.state_dict(), {"": "encoder.rnn", "embedding": "encoder.words"})
    same(cell, model["encoder"].rnn)
    assert torch.equal(cell.embedding.weight, model["encoder"].words.weight)
    assert cell.weight_ih_l0.requires_grad


def test_of_another_dtype() -> None:
    module, cell = nn.GRU(4, 6), GRUCell(4, 6).to(torch.bfloat16)
    load_weights(cell, module.state_dict())
    assert cell.weight_ih_l0.dtype == torch.bfloat16
    assert torch.equal(cell.weight_ih_l0, module.weight_ih_l0.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (nn.LSTM(4, 6, bidirectional=True), "second direction"),
        (nn.LSTM(4, 6, proj_size=3), "shape|proj_size"),
        (nn.LSTM(4, 6, 2), "as many layers"),
        (nn.LSTM(4, 5), r"\[20, 4\].*\[24, 4\]"),
        (nn.LSTM(4, 6, bias=False), "has no bias_ih_l0"),
        (nn.GRU(4, 6), "shape"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(theirs: nn.Module, message: str) -> None:
    cell = LSTMCell(4, 6)
    before = {name: value.clone() for name, value in cell.state_dict().items()}
    with pytest.raises(CheckpointError, match=message):
        load_weights(cell, theirs.state_dict())
    assert all(torch.equal(value, before[name]) for name, value in cell.state_dict().items())


def test_biases_that_a_cell_lacks_are_refused() -> None:
    with pytest.raises(CheckpointError, match="with biases"):
        load_weights(LSTMCell(4, 6, bias=False), nn.LSTM(4, 6).state_dict())


def test_a_missing_embedding_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"no embedding\.weight.*Give `names`"):
        load_weights(TokenGRUCell(9, 4, 6), nn.GRU(4, 6).state_dict())


def test_files_that_are_no_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a file"):
        load_weights(LSTMCell(4, 6), tmp_path / "none.pt")
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"12345678")
    with pytest.raises(CheckpointError, match="damaged"):
        load_weights(LSTMCell(4, 6), bad)
    torch.save(nn.LSTM(4, 6), tmp_path / "module.pt")
    with pytest.raises(CheckpointError, match=r"holds torch\.nn\.modules\.rnn\.LSTM.*save a state dict"):
        load_weights(LSTMCell(4, 6), tmp_path / "module.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(CheckpointError, match="holds a list"):
        load_weights(LSTMCell(4, 6), tmp_path / "list.pt")
