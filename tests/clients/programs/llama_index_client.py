"""llama-index, by its classes for servers like OpenAI's. Arguments: the address of the server."""

from __future__ import annotations

import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

SERVER = {"api_base": f"{sys.argv[1]}/v1", "api_key": "none", "max_retries": 0}
ASKED = []


class Animal(BaseModel):
    """An animal."""

    name: str
    legs: int


def weather(city: str) -> str:
    """The weather of a city."""
    ASKED.append(city)
    return f"rain in {city}"


model = OpenAILike(
    model="fake", is_chat_model=True, is_function_calling_model=True, context_window=4096, max_tokens=200, **SERVER
)
question = ChatMessage(role="user", content="How is the weather in Rome?")
assert model.chat([question]).message.content == "It rains."
parts = [one.delta or "" for one in model.stream_chat([question])]
assert "".join(parts) == "It rains."
assert len([part for part in parts if part]) > 1  # as they came, not at the end
said = model.predict_and_call([FunctionTool.from_defaults(weather)], user_msg=question.content)
assert (str(said), ASKED) == ("rain in Rome", ["Rome"])
made = model.structured_predict(Animal, PromptTemplate("Which animal?"))
assert made == Animal(name="fox", legs=4)
vectors = OpenAILikeEmbedding(model_name="fake", **SERVER).get_text_embedding_batch(["Once", "there"])
assert len(vectors) == 2
assert len(vectors[0]) > 1
