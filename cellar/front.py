"""Front: requests in, RequestOutputs out. Everything between a user's words and the engine's token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cellar import demo
from cellar.core.config import EngineConfig, ModelConfig
from cellar.core.errors import CapacityError, ConfigError, RequestError
from cellar.core.messages import FinishReason, Request, RequestOutput, StepOutput, StepPlan
from cellar.core.sampling import SamplingParams
from cellar.core.specs import ModelSpec
from cellar.engine import Engine
from cellar.outputs import OutputProcessor, Processed
from cellar.prompts import Prompt, PromptReader
from cellar.runtime.protocol import Runtime
from cellar.text.chat import ChatTemplate
from cellar.text.generation import NEUTRAL, GenerationConfig, read_generation_config
from cellar.text.grammar import GrammarCompiler
from cellar.text.masker import Masker
from cellar.text.tokenizer import Tokenizer

Wrap = Callable[[Runtime[StepPlan]], Runtime[StepPlan]]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that has been checked and not started: its n sequences."""

    id: str
    prompt: Prompt
    params: SamplingParams
    sequences: tuple[Request, ...]


class Front:
    """One engine and the text around it; belongs to one thread, except `engine.wake`.

    The n sequences of a request share the KV of its prompt: the first is added alone, its siblings when its
    first token has come, so that they find the prompt computed.
    """

    def __init__(
        self,
        engine: Engine[StepPlan],
        reader: PromptReader,
        tokenizer: Tokenizer | None = None,
        templates: ChatTemplate | None = None,
    ) -> None:
        self.engine = engine
        self.reader = reader
        self.tokenizer = tokenizer
        self.templates = templates
        self._outputs = OutputProcessor(tokenizer)
        self._siblings: dict[str, tuple[Request, ...]] = {}
        self._refused: list[StepOutput] = []  # what came to light between turns

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        priority: int = 0,
        conversation: str | None = None,
        salt: bytes = b"",
    ) -> Prepared:
        """Check a request and start nothing. Raises RequestError."""
        sequences = self.reader.requests(request_id, prompt, params, priority, conversation, salt)
        return Prepared(request_id, prompt, params, sequences)

    def start(self, prepared: Sequence[Prepared], stream: bool = False) -> None:
        """Start requests; all of them, or none and RequestError if one could never run."""
        for one in prepared:
            self.post(one, stream)
        refused = self._receive()
        reasons = [refused.pop(id) for one in prepared if (id := one.sequences[0].id) in refused]
        if reasons:
            for one in prepared:
                self.abort(one.id)
            self._receive()
            raise RequestError(str(reasons[0][1]))

    def post(self, one: Prepared, stream: bool = False) -> None:
        """Start a request at the next turn; if it could never run it comes back with an error.

        Only with `stream` there will be deltas. Raises RequestError if the id is in use.
        """
        ids = tuple(sequence.id for sequence in one.sequences)
        self._outputs.add(one.id, one.prompt.text, one.prompt.token_ids, one.params, ids, stream)
        if len(ids) > 1:
            self._siblings[ids[0]] = one.sequences[1:]
        self.engine.add(one.sequences[0])

    def abort(self, request_id: str) -> RequestOutput | None:
        """Drop a request at any moment, and give what there is of it; None if it is not running."""
        for id in self._outputs.live(request_id):
            self._siblings.pop(id, None)
            self.engine.abort(id)
        return self._outputs.abort(request_id)

    def turn(self, timeout: float | None = None) -> Processed:
        """One turn of the engine; -> news of streams, and requests that are complete."""
        news = Processed()
        frames = [output for output in self._refused if output.finished]
        self._refused.clear()
        for frame in frames or self.engine.turn(timeout):
            if self._siblings:
                self._add_siblings(frame)
            processed = self._outputs.process(frame)
            for end in processed.ends:
                self.engine.finish(end.sequence_id, end.num_tokens, end.reason)
            news.deltas += processed.deltas
            news.finished += processed.finished
        return news

    def output(self, request_id: str) -> RequestOutput:
        """A copy of what there is of a running request. Raises KeyError if it is not running."""
        return self._outputs.output(request_id)

    def close(self) -> None:
        """Free the engine."""
        self.engine.close()

    def _receive(self) -> dict[str, tuple[FinishReason, int | str | None]]:
        """Have the engine read its mailbox; -> what it refused. What stays in there comes with the next turn."""
        output = self.engine.receive()
        self._refused.append(output)
        return output.finished

    def _add_siblings(self, frame: StepOutput) -> None:
        for id in self._siblings.keys() & (set(frame.ids) | frame.finished.keys()):
            siblings = self._siblings.pop(id)
            if id in frame.ids:
                for sibling in siblings:
                    self.engine.add(sibling)
            else:  # it ended without a token, by an error that is theirs too
                frame.finished |= {sibling.id: frame.finished[id] for sibling in siblings}


@dataclass(frozen=True, slots=True)
class Opened:
    """A front, and what it was opened with: everything in `config` is decided."""

    front: Front
    config: EngineConfig
    spec: ModelSpec
    checkpoint: Path | None
    generation: GenerationConfig = NEUTRAL


def open_front(config: EngineConfig, wrap: Wrap = lambda runtime: runtime) -> Opened:
    """Load a model and its tokenizer, and put an engine over them.

    `wrap` may put something between engine and runtime, e.g. a meter. Raises CheckpointError, ConfigError,
    CapacityError or DeviceError.
    """
    from cellar.runtime.local import open_local
    from cellar.schedule.steps import StepScheduler

    checkpoint = _directory(config.model)
    # The cheap part first: a damaged tokenizer is found before gigabytes are read.
    tokenizer, templates = open_text(config.model, checkpoint)
    generation = read_generation_config(config.model.generation_config, checkpoint)
    try:
        opened = open_local(config, checkpoint)
        config, spec, capacity = opened.config, opened.spec, opened.runtime.capacity
        scheduler = StepScheduler(
            capacity.num_slots,
            capacity.num_rows,
            capacity.chunk_size,
            capacity.max_model_len,
            config.schedule,
            config.cache.enable_prefix_caching,
        )
    except MemoryError as error:
        raise CapacityError(
            f"this machine's memory does not hold the books of max_num_seqs {config.schedule.max_num_seqs} requests; "
            "lower max_num_seqs or max_model_len."
        ) from error
    reader = open_reader(spec, capacity.max_model_len, tokenizer, config.model.seed, generation)
    masker = None
    if tokenizer is not None:
        masker = Masker(GrammarCompiler(tokenizer, spec.vocab_size, reader.eos_token_ids))
    engine = Engine(scheduler, wrap(opened.runtime), run_ahead=config.schedule.run_ahead, masker=masker)
    return Opened(Front(engine, reader, tokenizer, templates), config, spec, checkpoint, generation)


def open_reader(
    spec: ModelSpec, max_model_len: int, tokenizer: Tokenizer | None, seed: int, generation: GenerationConfig
) -> PromptReader:
    """The reader of a model's prompts; an answer ends where any of the model's files says so."""
    ends = (*spec.eos_token_ids, *(tokenizer.eos_token_ids if tokenizer else ()), *generation.eos_token_ids)
    return PromptReader(
        vocab_size=spec.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=tuple(dict.fromkeys(ends)),
        tokenizer=tokenizer,
        seed=seed,
    )


def _directory(model: ModelConfig) -> Path | None:
    """Where the checkpoint is; None for dummy weights of a config that ships with the package."""
    from cellar.models.hub import resolve
    from cellar.models.registry import shipped_config

    if model.model is None:
        return demo.path()
    if model.load_format == "dummy" and shipped_config(model.model) is not None:
        return None
    return resolve(model.model)


def open_text(model: ModelConfig, checkpoint: Path | None) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """Tokenizer and chat template, from the model's directory or the one given."""
    from cellar.models.hub import resolve

    if model.skip_tokenizer_init:
        return None, None
    directory = resolve(model.tokenizer) if model.tokenizer is not None else checkpoint
    if directory is None:
        raise ConfigError(
            f"model {model.model} is a config without a tokenizer; set skip_tokenizer_init, or give a tokenizer."
        )
    tokenizer = Tokenizer.load(directory)
    return tokenizer, ChatTemplate.load(directory, tokenizer.special_tokens)
