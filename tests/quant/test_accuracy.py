"""What quantizing costs the model that ships: bits per byte of a text that is not its own."""

from __future__ import annotations

import math

import pytest
import torch
from tokenizers import Tokenizer

from cellar import demo
from cellar.models.loader import load
from cellar.models.registry import open_model, read_config
from tests.models.dense_context import logits_of

TEXT = """\
There was once a miller who lived beside a broad river, and he had three sons. The eldest was strong, the
second was clever, and the youngest, whom they called Little Tom, was kind to every creature that he met. One
evening, when the snow lay deep upon the fields, an old woman knocked at the door and asked for a piece of
bread and a place by the fire. The two elder brothers laughed at her and told her to go away, but Little Tom
gave her half of his supper and his own warm coat. "You have a good heart," said the old woman, "and it shall
not be forgotten. When the spring comes, go to the great oak that stands behind the mill, and knock upon it
three times." Then she went out into the dark, and nobody saw which way she had gone. All through the winter
the boy thought of her words, and on the first morning of spring he ran to the oak tree and knocked. At once a
little door opened in the bark, and there he saw a golden bird in a silver cage."""


def bits_per_byte(quantization: str | None) -> float:
    config = read_config(demo.path())
    model = open_model(config, "float32", quantization=quantization)
    weights = load(model.spec, demo.path())
    ids = torch.tensor(Tokenizer.from_file(str(demo.path() / "tokenizer.json")).encode(TEXT).ids)
    with torch.inference_mode():
        found = logits_of(model, weights, ids[:-1], [len(ids) - 1]).log_softmax(-1)
    return -found.gather(1, ids[1:, None]).sum().item() / math.log(2) / len(TEXT.encode())


@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.003), ("fp8", 0.01), ("int4", 0.03), ("w8a8", 0.01)])
def test_the_demo_model_loses_little(quantization: str, most: float) -> None:
    plain, found = bits_per_byte(None), bits_per_byte(quantization)
    assert 0.5 < plain < 2.5
    assert 0 < abs(found / plain - 1) < most
