"""LLM: the Python API for batches, in vLLM's words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from cellar.core.config import EngineConfig
from cellar.core.errors import RequestError
from cellar.core.messages import RequestOutput, SchedulerStats
from cellar.core.pooling import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingParams,
    ScoringOutput,
    ScoringRequestOutput,
    cosine,
    embedded,
    pairs,
)
from cellar.core.sampling import SamplingParams
from cellar.core.specs import ModelSpec
from cellar.engine.front import Front
from cellar.engine.inboxes import Inboxes
from cellar.engine.interrupt import DeferredInterrupt
from cellar.engine.opened import Opened, open_front
from cellar.engine.progress import Progress
from cellar.engine.prompts import Prompt, as_list
from cellar.planner.passes import predicted_rate
from cellar.planner.saved import SavedPlan
from cellar.runtime.offload.opened import OffloadReport
from cellar.text.generation import GenerationConfig
from cellar.text.pooling import read_pooling
from cellar.text.tokenizer import Tokenizer

Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model, ready to generate.

    `model` is a directory in Hugging Face's layout or a hub name; without one it is the model that ships with
    Cellar. `options` are the fields of `cellar.core.config`: dtype, max_model_len, max_num_seqs,
    max_num_batched_tokens, gpu_memory_utilization, kv_cache_memory_bytes, block_size, enable_prefix_caching,
    load_format, tokenizer, skip_tokenizer_init, seed, device and so on. With `plan`, the file of a plan, the engine
    is what the plan says. Raises ConfigError for an unknown one
    and names the nearest. One thread at a time; `AsyncLLM` is for many.
    """

    def __init__(self, model: str | PathLike[str] | None = None, **options: Any) -> None:
        self._take(open_front(EngineConfig.of(model=model, **options)))

    @classmethod
    def over(cls, opened: Opened) -> LLM:
        """An LLM over a front that is open already."""
        llm = cls.__new__(cls)
        llm._take(opened)
        return llm

    def _take(self, opened: Opened) -> None:
        self._front: Front = opened.front
        self._opened = opened
        self._count = 0
        self._inboxes = Inboxes(opened.front)

    # -- generating -------------------------------------------------------------------------------

    def generate(
        self,
        prompts: object,
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continue one prompt or many; results in the order of the prompts.

        A prompt is a string, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}.
        `sampling_params` is one for all, or one for each; None is `get_default_sampling_params()`. `priority` is one
        for each, lower ones go first if scheduling_policy is "priority".

        All are checked before any starts: RequestError. A request that fails on its way has finish_reason "error"
        and the reason in stop_reason. Ctrl-C drops all of them and leaves the engine usable.
        """
        return self._complete(self._front.reader.read_all(prompts), sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several (a list of such lists), as `generate` does.

        With `continue_final_message` (and without `add_generation_prompt`) the answer goes on with the last message.
        """
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "continue_final_message goes on with the last message, add_generation_prompt begins another; set one.",
                "continue_final_message",
            )
        many = (
            bool(messages)
            and not isinstance(messages, (str, bytes, Mapping))
            and isinstance(messages[0], (list, tuple))
        )
        conversations = messages if many else [messages]
        extra = dict(chat_template_kwargs or {})
        prompts = [
            self._front.read_chat(one, add_generation_prompt, extra, continue_final_message) for one in conversations
        ]
        return self._complete(prompts, sampling_params, use_tqdm)

    def embed(
        self, prompts: object, *, pooling_params: PoolingParams | None = None, use_tqdm: bool = True
    ) -> list[EmbeddingRequestOutput]:
        """The vector of each prompt, made of its final hidden states; forms of prompts and errors as in `generate`.

        A prompt may fill the whole context. Raises RequestError also for one that fails on its way.
        """
        params = pooling_params or PoolingParams()
        sampling = params.sampling(self.spec.vector_size, read_pooling(self.checkpoint))
        outputs = self._complete(self._front.reader.read_all(prompts, room=0), sampling, use_tqdm)
        return [
            EmbeddingRequestOutput(
                output.request_id,
                list(output.prompt_token_ids),
                EmbeddingOutput(embedded(output, params).tolist()),
                output.num_cached_tokens,
            )
            for output in outputs
        ]

    def score(
        self,
        data_1: object,
        data_2: object,
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
    ) -> list[ScoringRequestOutput]:
        """How near texts are to each other, by the cosine of their vectors: one to each of many, or each to its own."""
        first, second = as_list(data_1), as_list(data_2)
        wanted = pairs(len(first), len(second))
        params = PoolingParams(pooling=None if pooling_params is None else pooling_params.pooling)
        found = self.embed([*first, *second], pooling_params=params, use_tqdm=use_tqdm)
        vectors = [np.array(one.outputs.embedding, np.float32) for one in found]
        both = [(found[i], found[len(first) + k], cosine(vectors[i], vectors[len(first) + k])) for i, k in wanted]
        return [
            ScoringRequestOutput(
                b.request_id,
                a.prompt_token_ids + b.prompt_token_ids,
                ScoringOutput(score),
                a.num_cached_tokens + b.num_cached_tokens,
            )
            for a, b, score in both
        ]

    def stream(self, prompt: object, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Continue one prompt; yields the output so far whenever there is more. Closing the iterator drops it."""
        return self._stream(self._front.reader.read(prompt), sampling_params)

    def stream_chat(
        self, messages: Sequence[Any], sampling_params: SamplingParams | None = None, **variables: Any
    ) -> Iterator[RequestOutput]:
        """Answer one conversation; yields as `stream` does. `variables` go to the chat template."""
        return self._stream(self._front.read_chat(messages, True, variables), sampling_params)

    # -- what it is -------------------------------------------------------------------------------

    def get_default_sampling_params(self) -> SamplingParams:
        """How a request is sampled that brings no parameters: as the model's generation_config.json says."""
        return self.generation.params()

    @property
    def generation(self) -> GenerationConfig:
        """What the model's generation_config.json says of sampling, and only that."""
        return self._opened.generation

    @property
    def config(self) -> EngineConfig:
        """All options, with everything decided that said `auto` or None."""
        return self._opened.config

    @property
    def spec(self) -> ModelSpec:
        """What the model is."""
        return self._opened.spec

    @property
    def plan(self) -> SavedPlan | None:
        """The plan that is obeyed, if one was given, or made because the model does not fit `device_memory`."""
        return self._opened.plan

    @property
    def offload(self) -> OffloadReport | None:
        """What lies where of a model that is larger than its device; None if it lies on the device."""
        return self._opened.offload

    @property
    def checkpoint(self) -> Path | None:
        """Directory of the model; None for dummy weights of a config that ships with the package."""
        return self._opened.checkpoint

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt plus output."""
        return self._front.reader.max_model_len

    @property
    def has_tokenizer(self) -> bool:
        """False if the engine takes and gives token ids only."""
        return self._front.tokenizer is not None

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises RequestError if it was skipped."""
        if self._front.tokenizer is None:
            raise RequestError("there is no tokenizer; open the LLM without skip_tokenizer_init.")
        return self._front.tokenizer

    def stats(self) -> SchedulerStats:
        """A snapshot of queues and cache, and counts since the start."""
        return self._front.engine.stats()

    def close(self) -> None:
        """Free the model's memory; the LLM is of no use afterwards."""
        self._front.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- how --------------------------------------------------------------------------------------

    def _complete(
        self, prompts: list[Prompt], sampling_params: Params, use_tqdm: bool, priority: Sequence[int] | None = None
    ) -> list[RequestOutput]:
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        each = _one_for_each(params, len(prompts))
        first, ranks = self._count, priority if priority is not None else [0] * len(prompts)
        if len(ranks) != len(prompts):
            raise RequestError(
                f"there are {len(ranks)} priorities for {len(prompts)} prompts; give one for each.", "priority"
            )
        prepared = [
            self._front.prepare(str(first + k), prompt, params, rank)
            for k, (prompt, params, rank) in enumerate(zip(prompts, each, ranks, strict=True))
        ]
        self._count += len(prepared)
        ids = [one.id for one in prepared]
        done: dict[str, RequestOutput] = {}
        with self._inboxes.open(ids) as inbox:
            self._front.start(prepared)
            predicted = predicted_rate(self._opened.plan, len(ids))
            progress = Progress(len(ids), use_tqdm, predicted, self.stats)
            with progress, DeferredInterrupt() as interrupt:
                while len(done) < len(ids):
                    interrupt.check()
                    finished = self._inboxes.read(inbox)
                    done |= {output.request_id: output for output in finished}
                    progress.turned(len(finished))
        return [done[id] for id in ids]

    def _stream(self, prompt: Prompt, sampling_params: SamplingParams | None) -> Iterator[RequestOutput]:
        id = str(self._count)
        prepared = self._front.prepare(id, prompt, sampling_params or self.get_default_sampling_params())
        self._count += 1
        with self._inboxes.open([id]) as inbox:
            self._front.start([prepared], stream=True)
            finished = False
            while not finished:
                with DeferredInterrupt():
                    news = self._inboxes.read(inbox)
                for output in news:
                    yield output
                    finished = output.finished


def _one_for_each(sampling_params: SamplingParams | Sequence[SamplingParams], count: int) -> Sequence[SamplingParams]:
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * count
    if not isinstance(sampling_params, Sequence) or not all(isinstance(p, SamplingParams) for p in sampling_params):
        kind = type(sampling_params).__name__
        raise RequestError(
            f"sampling_params is a {kind}; it must be SamplingParams, or a list of them.", "sampling_params"
        )
    if len(sampling_params) != count:
        raise RequestError(
            f"there are {len(sampling_params)} sampling_params for {count} prompts; give one for all or one for each.",
            "sampling_params",
        )
    return sampling_params
