"""inspect-ai: a task of two samples. Arguments: the address of the server, a folder for logs."""

from __future__ import annotations

import sys

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import match
from inspect_ai.solver import generate

url, folder = sys.argv[1:]
samples = [Sample(input="What is the capital of Italy?", target="Rome"), Sample(input="Of France?", target="Paris")]
model = get_model("openai-api/cellar/fake", base_url=f"{url}/v1", api_key="none")
(log,) = eval(Task(dataset=samples, solver=generate(), scorer=match()), model, log_dir=folder, display="none")
assert log.status == "success", log.error
assert log.results is not None
assert log.results.completed_samples == 2
assert log.results.scores[0].metrics["accuracy"].value == 0.5  # the server says Rome to both
