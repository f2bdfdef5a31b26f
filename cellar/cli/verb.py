"""What all verbs share: options generated from dataclasses, and errors shown as one sentence."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, get_type_hints

import typer

from cellar.core.collector import collector_rests
from cellar.core.config import CacheConfig, DeviceConfig, ModelConfig, OffloadConfig, ScheduleConfig
from cellar.core.driver import retain_context
from cellar.core.errors import CellarError
from cellar.core.sampling import SamplingParams

Verb = Callable[..., Any]


@dataclass(frozen=True)
class OptionGroup:
    """Options from the fields of dataclasses. A verb gets them as one dict of fields and values.

    An option's type is the field's, or what its metadata has as "option". `help` is used for fields that bring none of
    their own in their metadata; `defaults` replace the fields'; `models` are fields that a model may know better: their
    options are None unless given, with these values where the model has none; `skip` are fields without an option.
    """

    title: str
    kinds: tuple[type, ...]
    help: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    models: Mapping[str, Any] = field(default_factory=dict)
    skip: frozenset[str] = frozenset()

    def names(self) -> list[str]:
        """The fields that become options."""
        return [f.name for kind in self.kinds for f in dataclasses.fields(kind) if f.init and f.name not in self.skip]

    def parameters(self) -> list[inspect.Parameter]:
        """One keyword parameter per option, as typer reads them."""
        return [self._parameter(kind, name) for kind in self.kinds for name in self.names() if _has(kind, name)]

    def _parameter(self, kind: type, name: str) -> inspect.Parameter:
        described = kind.__dataclass_fields__[name]  # type: ignore[attr-defined]
        annotation = _LISTS.get(name) or described.metadata.get("option") or get_type_hints(kind)[name]
        text = described.metadata.get("help") or self.help[name]
        default = self.defaults.get(name, described.default)
        if name in self.models:
            annotation, default = annotation | None, None
            text = f"{text} Default: the model's, else {self.models[name]:g}."
        # A switch that is off needs no name for "off".
        flags = (f"--{name.replace('_', '-')}",) if default is False else ()
        option = typer.Option(*flags, help=text, rich_help_panel=self.title)
        annotated = Annotated.__class_getitem__((annotation, option))  # type: ignore[attr-defined]
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotated)


@contextmanager
def importing_for(device: DeviceConfig) -> Iterator[None]:
    """Around the imports of what runs a model in this process: its device is got ready beside them."""
    retain_context(device)
    with collector_rests():
        yield


def _has(kind: type, name: str) -> bool:
    return name in kind.__dataclass_fields__  # type: ignore[attr-defined]


# Options that may be given several times; the fields take any sequence.
_LISTS: Mapping[str, Any] = {"stop": list[str] | None}

ENGINE = OptionGroup(
    "Engine",
    (ModelConfig, CacheConfig, ScheduleConfig, DeviceConfig, OffloadConfig),
    # For the Python API and benchmarks: `cellar profile` writes where it is found without being named; the reserve and
    # how far steps run ahead are matters of experiments. Whom a long prompt keeps waiting is a server's matter.
    skip=frozenset({"machine_profile", "decode_reserve", "run_ahead", "max_mixed_seconds", "mask_timeout"}),
)

ALONE = replace(
    ENGINE,
    # One user's prompts, none with a priority, all there at once or one after the other: which of them a policy prefers
    # changes nothing, and what machines share is kept by the servers and batches that run there.
    skip=ENGINE.skip
    | {"scheduling_policy", "kv_eviction_policy", "kv_remote", "kv_remote_size", "kv_remote_ttl", "kv_remote_key_file"},
)

SAMPLING = OptionGroup(
    "Sampling",
    (SamplingParams,),
    help={
        "n": "Continuations of each prompt.",
        "temperature": "0 is greedy; higher is more varied.",
        "top_p": "Keep the likeliest tokens up to this total probability.",
        "top_k": "Keep this many likeliest tokens; 0 keeps all.",
        "min_p": "Keep tokens at least this likely, relative to the likeliest.",
        "repetition_penalty": "Above 1 makes tokens of prompt and output less likely.",
        "frequency_penalty": "Subtracted from a token's logit for each time it was generated.",
        "presence_penalty": "Subtracted from a token's logit once it was generated.",
        "max_tokens": "Most tokens to generate.",
        "min_tokens": "Fewest tokens before an end symbol may come.",
        "stop": "Text that ends the output; may be given several times.",
        "ignore_eos": "Go on past end symbols.",
        "logprobs": "Log-probabilities of this many likeliest tokens, in the JSON output.",
    },
    models={
        "temperature": 0.8,
        "top_p": 0.95,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": 256,
    },
    # The engine's --seed decides; what changes the text's form, biases, grammars and raw ids are for the Python API.
    skip=frozenset(
        {
            "seed",
            "stop_token_ids",
            "prompt_logprobs",
            "logit_bias",
            "detokenize",
            "structured_outputs",
            "thinking",
            "pooling",
            "bad_words",
            "allowed_token_ids",
            "include_stop_str_in_output",
            "skip_special_tokens",
        }
    ),
)


def verb(**groups: OptionGroup) -> Callable[[Verb], Verb]:
    """A command of the command line: each group becomes options, which the function gets as one dict.

    A CellarError ends the program with its message and exit code 2; Ctrl-C with 130.
    """

    def decorate(function: Verb) -> Verb:
        own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.name not in groups]
        generated = [p for group in groups.values() for p in group.parameters()]

        @functools.wraps(function)
        def command(**values: Any) -> Any:
            sorted_in = {name: {key: values.pop(key) for key in group.names()} for name, group in groups.items()}
            try:
                return function(**values, **sorted_in)
            except CellarError as error:
                sys.stdout.flush()
                typer.echo(f"cellar: {error}", err=True)
                raise typer.Exit(2) from error
            except KeyboardInterrupt:
                raise typer.Exit(130) from None
            except BrokenPipeError:  # the reader has left; what is still buffered has nowhere to go
                unread()
                raise typer.Exit(141) from None

        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + generated
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def unread() -> None:
    """Standard output goes nowhere from here on, nor what is still buffered of it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def sampling_params(options: Mapping[str, Any], models: Mapping[str, Any] | None = None) -> SamplingParams:
    """SamplingParams from a verb's options, and from what the model has for those that are not given."""
    given = {name: tuple(v) if isinstance(v, list) else v for name, v in options.items() if v is not None}
    return SamplingParams(**{**SAMPLING.models, **(models or {}), **given})
