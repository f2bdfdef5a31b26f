"""lm-eval over HTTP and by transformers on the same lines.

Arguments: the address of the server, the model's folder, a file of lines. Prints for each way to begin a text, as JSON:
the log-likelihoods of the last words by both, and the figures of both.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

url, folder, lines = sys.argv[1:]
TASK: dict[str, Any] = {
    "task": "last_words",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": lines}},
    "output_type": "loglikelihood",
    "test_split": "test",
    "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}",
    "doc_to_target": "{{' ' + text.split(' ')[-1]}}",
    "metric_list": [{"metric": "perplexity", "aggregation": "perplexity"}, {"metric": "acc", "aggregation": "mean"}],
}


def said(model: Any) -> tuple[list[float], dict[str, float]]:
    """-> the log-likelihood of each line's last word, and perplexity and accuracy."""
    found = simple_evaluate(model, tasks=[TASK], task_manager=TaskManager(), bootstrap_iters=0)
    assert found is not None
    likelihoods = [float(one["filtered_resps"][0][0]) for one in found["samples"]["last_words"]]
    result = found["results"]["last_words"]
    return likelihoods, {"perplexity": result["perplexity,none"], "accuracy": result["acc,none"]}


def over_http(tokenizer: str) -> LocalCompletionsAPI:
    """`remote` asks the server for ids, `huggingface` makes them here."""
    return LocalCompletionsAPI(
        model="cellar-demo",
        base_url=f"{url}/v1/completions",
        tokenizer=folder,
        tokenizer_backend=tokenizer,
        tokenized_requests=True,
        num_concurrent=16,
        max_retries=1,
    )


def by_transformers(begins: bool) -> HFLM:
    return HFLM(pretrained=folder, dtype="float32", device="cpu", batch_size=16, add_bos_token=begins)


answers = {}
for name, tokenizer, begins in (("bare", "huggingface", False), ("begun", "remote", True)):
    answers[name] = {"http": said(over_http(tokenizer)), "transformers": said(by_transformers(begins))}
print(json.dumps(answers))
