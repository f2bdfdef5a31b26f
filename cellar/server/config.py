"""Options of the server, named as vLLM names them where it has them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cellar.core.errors import CheckpointError, ConfigError
from cellar.text.reasoning.registry import OFF, STYLES
from cellar.text.tools.registry import PARSERS


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


def _secrets(help: str) -> Any:
    """An option that may be given several times, and whose values are not printed with the others."""
    return field(default=None, repr=False, metadata={"help": help, "option": list[str] | None})


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where to listen, and who may connect."""

    host: str = _option("127.0.0.1", "Address to listen on; 0.0.0.0 for all.")
    port: int = _option(8000, "Port to listen on; 0 takes a free one.")
    served_model_name: str | Sequence[str] | None = field(
        default=None,
        metadata={
            "help": "Name of the model in the API; several times, or separated by commas. Answers have the first.",
            "option": list[str] | None,
        },
    )
    api_key: str | Sequence[str] | None = _secrets(
        "Key that clients must present; several times, or separated by commas. Others on this machine see it in the "
        "list of processes until the server has read it: better use --api-key-file, or CELLAR_API_KEY in the "
        "environment."
    )
    api_key_file: str | None = _option(None, "File with one key per line; # begins a comment.")
    ssl_certfile: str | None = _option(None, "Certificate chain in PEM: serve HTTPS.")
    ssl_keyfile: str | None = _option(None, "Its key in PEM, without a password; default: in the same file.")
    share_prefixes: bool = _option(False, "Let clients with different keys share cached prompts.")
    allowed_hosts: str | None = _option(
        None,
        "Names by which clients may call the server, separated by commas; *.NAME for all below a name, * for any. "
        "Default: any, but only localhost on a loopback address without keys.",
    )
    allowed_origins: str | None = _option(None, "Web origins that may call the API, separated by commas; * for any.")
    api_server_count: int = _option(1, "Front processes that share the port and the engines.")
    replicas: int = _option(
        1, "Engines of the model on this machine, each with its share of GPUs or processor threads."
    )
    disable_frontend_multiprocessing: bool = _option(False, "Run the engine in the server's own process.")
    chat_template: str | None = _option(None, "File with a Jinja chat template instead of the model's own.")
    tool_call_parser: str | None = _option(
        None, f"How the model writes tool calls: {', '.join(PARSERS)}; default: as its chat template shows."
    )
    reasoning_parser: str | None = _option(
        None, f"How the model marks its reasoning: {', '.join(STYLES)} or {OFF}; default: as its chat template shows."
    )
    data_dir: str | None = _option(
        None, "Directory of what the server keeps: conversations, and a key; default: $XDG_DATA_HOME/cellar."
    )
    conversation_store: str | None = _option(
        None, "URL of a PostgreSQL database that keeps conversations; default: SQLite in the data directory."
    )
    log_level: str = _option("info", "critical, error, warning, info or debug.")
    enable_log_requests: bool = _option(False, "Log id, sizes and parameters of each request; never its text.")

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port is {self.port}; it must be in [0, 65536).")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_keyfile is given without a certificate; give ssl_certfile, too.")
        if self.api_server_count < 1:
            raise ConfigError(f"api_server_count is {self.api_server_count}; it must be at least 1.")
        if self.replicas < 1:
            raise ConfigError(f"replicas is {self.replicas}; it must be at least 1.")
        for name in ("api_server_count", "replicas"):
            if getattr(self, name) > 1 and self.disable_frontend_multiprocessing:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}, but without processes of their own there are one front and one "
                    "engine; leave disable_frontend_multiprocessing out."
                )
        if self.chat_template is not None:
            from cellar.text.chat import (
                ChatTemplate,
            )  # here, since it needs a tokenizer's packages, which help does not

            try:
                ChatTemplate.read(self.chat_template)
            except CheckpointError as error:
                raise ConfigError(f"{error} Give chat_template a file with a Jinja template.") from error
        if self.tool_call_parser is not None and self.tool_call_parser not in PARSERS:
            raise ConfigError(f"tool_call_parser is {self.tool_call_parser!r}; use one of {', '.join(PARSERS)}.")
        if self.reasoning_parser not in (None, OFF, *STYLES):
            raise ConfigError(f"reasoning_parser is {self.reasoning_parser!r}; use one of {', '.join((*STYLES, OFF))}.")
        if self.log_level not in ("critical", "error", "warning", "info", "debug"):
            raise ConfigError(
                f"log_level {self.log_level!r} is not known; use critical, error, warning, info or debug."
            )

    @property
    def has_one_engine_beside(self) -> bool:
        """One front in this process, and one engine in another."""
        return self.replicas == self.api_server_count == 1 and not self.disable_frontend_multiprocessing


_AT_LEAST_ONE = (
    *("max_request_sequences", "max_listed_tokens", "max_request_logprobs", "max_queued_requests"),
    *("max_queued_tokens", "max_body_bytes", "max_body_values", "max_head_bytes", "max_grammar_bytes"),
    "conversation_bytes",
)
_AT_LEAST_ONE_IF_GIVEN = (
    *("max_key_queued_requests", "max_key_queued_tokens", "max_connections", "max_connections_per_address"),
)


@dataclass(frozen=True, kw_only=True)
class LimitConfig:
    """What one request may ask for, and how many may wait."""

    max_prompt_len: int | None = _option(None, "Longest prompt, in tokens; default: what the context holds.")
    max_request_sequences: int = _option(1024, "Most sequences of a request: its prompts times n.")
    max_listed_tokens: int = _option(1024, "Most token ids in a request's stop_token_ids, and in its logit_bias.")
    max_request_logprobs: int = _option(
        2**21, "Most log-probabilities of an answer: of scored prompts and n times max_tokens, with alternatives."
    )
    max_queued_requests: int = _option(4096, "Most sequences that may wait for their first token; more get a 503.")
    max_queued_tokens: int = _option(4_000_000, "Most prompt tokens that may wait; more get a 503.")
    max_key_queued_requests: int | None = _option(
        None, "Most sequences of one API key that may wait; more get a 429; default: as of all together."
    )
    max_key_queued_tokens: int | None = _option(None, "Most prompt tokens of one API key that may wait, likewise.")
    max_body_bytes: int = _option(8 * 2**20, "Largest request body.")
    max_body_values: int = _option(2**20, "Most values in a request's body: numbers, texts, lists and objects.")
    max_head_bytes: int = _option(64 * 2**10, "Largest head of a request: its line and headers.")
    max_connections: int | None = _option(None, "Most open connections; default: what file descriptors allow.")
    max_connections_per_address: int | None = _option(None, "Most of them from one address; default: all.")
    upload_timeout: float = _option(
        60.0, "Seconds for the head of a request to come, for its body, and for a client to read on in its answer."
    )
    max_grammar_bytes: int = _option(2**18, "Largest JSON schema, regular expression or grammar of a request.")
    prepare_timeout: float = _option(5.0, "CPU seconds to render a request's messages or compile its grammar.")
    request_timeout: float | None = _option(None, "Seconds that a request may take; default: no limit.")
    conversation_ttl: float = _option(
        30 * 86400.0, "Seconds that a conversation is kept after its last turn; 0: until it is deleted."
    )
    conversation_bytes: int = _option(8 * 2**30, "Most bytes of all conversations; the oldest idle ones go first.")
    shutdown_timeout: float = _option(30.0, "Seconds for running requests to finish after SIGTERM.")

    def __post_init__(self) -> None:
        for name in (*_AT_LEAST_ONE, *_AT_LEAST_ONE_IF_GIVEN):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.max_prompt_len is not None and self.max_prompt_len < 1:
            raise ConfigError(f"max_prompt_len is {self.max_prompt_len}; it must be at least 1.")
        for name in ("prepare_timeout", "upload_timeout"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be a positive number of seconds.")
        if self.request_timeout is not None and self.request_timeout <= 0:
            raise ConfigError(f"request_timeout is {self.request_timeout}; it must be positive.")
        if not 0 <= self.conversation_ttl < math.inf:
            raise ConfigError(f"conversation_ttl is {self.conversation_ttl}; it must be a number of seconds, or 0.")
        if self.shutdown_timeout < 0:
            raise ConfigError(f"shutdown_timeout is {self.shutdown_timeout}; it must not be negative.")
