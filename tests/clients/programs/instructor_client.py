"""instructor in the three ways that it asks for a structure. Arguments: the address of the server."""

from __future__ import annotations

import sys

import instructor
import openai
from pydantic import BaseModel


class Animal(BaseModel):
    """An animal."""

    name: str
    legs: int


client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA):
    made = instructor.from_openai(client, mode=mode).chat.completions.create(
        model="fake",
        response_model=Animal,
        max_retries=0,
        messages=[{"role": "user", "content": "Which animal?"}],
    )
    assert made.model_dump() == {"name": "fox", "legs": 4}, mode
