"""Structured output of the demo model: what it costs in tokens."""

from __future__ import annotations

import json
from typing import Any

from cellar import LLM, SamplingParams
from cellar.core.sampling import StructuredOutputsParams

DOG: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"enum": ["dog", "bird"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["kind", "legs"],
}
PYDANTIC: dict[str, Any] = {
    "properties": {
        "name": {"title": "Name", "type": "string", "maxLength": 20},
        "age": {"title": "Age", "type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "title": "User",
    "type": "object",
}


def test_no_token_is_spent_on_blanks_or_inventions() -> None:
    """The least that the text needs, and one blank after each comma and colon: 181 and 600 tokens before."""
    llm = LLM()
    tokenizer = llm.get_tokenizer()
    for schema in (DOG, PYDANTIC):
        params = [
            SamplingParams(
                temperature=1.0, seed=seed, max_tokens=600, structured_outputs=StructuredOutputsParams(json=schema)
            )
            for seed in range(4)
        ]
        for output in llm.generate(["Once upon a time there was a dog."] * 4, params, use_tqdm=False):
            (made,) = output.outputs
            assert made.finish_reason == "stop"
            found = json.loads(made.text)
            assert set(found) == set(schema["properties"])
            assert len(made.token_ids) <= 12 + len(tokenizer.encode(json.dumps(found), add_special_tokens=False))
    llm.close()
