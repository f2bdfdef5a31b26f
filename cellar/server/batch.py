"""Batches in OpenAI's file format, answered by the server's own application, without a socket.

One request per line in, one result per line out, in the order in which they finish. A result is one append of one
whole line, so that what a killed run has left is a file of results, but for its last line perhaps, which is cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send

from cellar.core.errors import CellarError, ConfigError
from cellar.server.errors import refused
from cellar.server.host import EngineHost

_ID = "batch_req_"
_BEGINNING = f'{{"id":"{_ID}'.encode()
_NAMED = "8"
"""Version, the 13th digit, of ids that tell what was asked for; older ones were random (version 4)."""

_SURELY_FLAT = 200
"""Lists and objects of a line that can be written from anywhere, however they are nested."""

MOST_BYTES = 64 * 2**20
"""Bytes of lines that are under way at a time; one line may be longer."""

_SAMPLED = ("/v1/completions", "/v1/chat/completions")
URLS = (*_SAMPLED, "/v1/embeddings", "/v1/score", "/v1/rerank")


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A line that can be sent, of so many bytes."""

    line: int
    custom_id: str
    url: str
    body: dict[str, Any]
    nbytes: int

    @property
    def id(self) -> str:
        """Of its result: a UUID of version 8, made of what it asks for, so that a later run can tell."""
        asked = json.dumps([self.custom_id, self.url, self.body], sort_keys=True).encode()
        made = hashlib.blake2b(asked, digest_size=16).hexdigest()
        return f"{_ID}{made[:12]}{_NAMED}{made[13:]}"


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that cannot; `code` is OpenAI's where it has one."""

    line: int
    custom_id: str | None
    code: str
    message: str


def read_requests(path: Path) -> Iterator[BatchRequest | BadLine]:
    """Lines of a batch, in order; blank ones are skipped. Raises ConfigError if it cannot be read, or only once."""
    seen: dict[str, int] = {}
    if path.exists() and not path.is_file():
        raise ConfigError(
            f"the batch {path} cannot be read again and again, as this needs; give a file of JSON lines, not a pipe or "
            "a folder."
        )
    try:
        with path.open("rb") as file:
            for number, data in enumerate(file, 1):
                if data.strip():
                    yield _read_line(number, data, seen)
    except OSError as error:
        raise ConfigError(f"the batch {path} cannot be read ({error.strerror}); give a file of JSON lines.") from error


def _read_line(number: int, data: bytes, seen: dict[str, int]) -> BatchRequest | BadLine:
    try:
        line = json.loads(data)
    except (ValueError, RecursionError) as error:
        return BadLine(number, None, "invalid_json_line", f"line {number} is not JSON ({error}).")
    if not isinstance(line, dict):
        return BadLine(number, None, "invalid_json_line", f"line {number} is not a JSON object.")
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return BadLine(number, None, "missing_required_parameter", f"line {number} has no custom_id; give a string.")
    if custom_id in seen:
        text = f"line {number} has the custom_id of line {seen[custom_id]}; give each line its own."
        return BadLine(number, custom_id, "duplicate_custom_id", text)
    seen[custom_id] = number
    for name in line:
        if name not in ("custom_id", "method", "url", "body"):
            return BadLine(number, custom_id, "unknown_parameter", f"line {number} has {name[:64]!r}; leave it out.")
    if line.get("method") != "POST":
        return BadLine(number, custom_id, "invalid_method", f"the method of line {number} must be POST.")
    url = line.get("url")
    if url not in URLS:
        return BadLine(number, custom_id, "invalid_url", f"the url of line {number} must be one of {', '.join(URLS)}.")
    body = line.get("body")
    if not isinstance(body, dict):
        return BadLine(number, custom_id, "missing_required_parameter", f"line {number} has no body; give an object.")
    request = BatchRequest(number, custom_id, url, body, len(data))
    try:
        if data.count(b"[") + data.count(b"{") > _SURELY_FLAT:
            request.id  # noqa: B018 (whoever can read a body may still not be able to write it)
    except RecursionError:
        return BadLine(number, custom_id, "invalid_json_line", f"line {number} is nested too deeply; flatten its body.")
    return request


class ResultFile:
    """The output of a batch: what is in it already, and a place for more. One process at a time."""

    def __init__(self, path: Path) -> None:
        """Open or create. Raises ConfigError if it is in use, or holds something else than results."""
        self._path = path
        try:
            # What is no file, a pipe say, holds no results to read and cannot be locked.
            self.is_file = not path.exists() or path.is_file()
            mode = os.O_RDWR | os.O_CREAT | os.O_APPEND if self.is_file else os.O_WRONLY
            self._fd = os.open(path, mode, 0o666)
        except OSError as error:
            raise ConfigError(f"the output {path} cannot be written ({error.strerror}); give another file.") from error
        self.finished: dict[str, str] = {}
        self.bad_lines: set[tuple[int, str]] = set()
        self.num_failed = 0
        self._size = 0
        self._damaged = False
        if not self.is_file:
            return
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise ConfigError(f"the output {path} is being written by another batch; wait for it to end.") from None
        try:
            self._mend()
        except BaseException:
            os.close(self._fd)
            raise

    def has(self, line: BatchRequest | BadLine) -> bool:
        """True if the result of a line is there. Raises ConfigError if that is of something else by the same name."""
        if isinstance(line, BadLine):
            return (line.line, line.message) in self.bad_lines
        id = self.finished.get(line.custom_id)
        if id is not None and id[len(_ID) :][12:13] == _NAMED and id != line.id:
            raise ConfigError(
                f"line {line.line} asks for something else than what {self._path} has a result of by the custom_id "
                f"{line.custom_id[:64]!r}; give it another custom_id, or the batch another output."
            )
        return id is not None

    def append(self, record: Mapping[str, Any]) -> None:
        """One more line, at the end, in one write. Raises ConfigError if the disk is full or the file is gone."""
        if self._damaged:
            raise ConfigError(f"the output {self._path} could not be written before; run the same command again.")
        if self.is_file and not os.fstat(self._fd).st_nlink:
            raise ConfigError(f"the output {self._path} was deleted or replaced meanwhile; run the same command again.")
        data = _line(record)
        written = 0
        while written < len(data):
            try:
                written += os.write(self._fd, data[written:])
            except OSError as error:
                self._damaged = True  # what fits later would stand behind half a line
                with contextlib.suppress(OSError):
                    if self.is_file:
                        os.ftruncate(self._fd, self._size)
                raise ConfigError(f"the output {self._path} cannot be written ({error.strerror}).") from error
        self._size += written

    def close(self) -> None:
        """Everything is on the disk."""
        with contextlib.suppress(OSError):  # a pipe or a device has no disk
            os.fsync(self._fd)
        os.close(self._fd)

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _mend(self) -> None:
        """Read what is there, and cut off a last line that was not written to its end, be it by zeros after a crash."""
        whole = 0
        with open(self._fd, "rb", closefd=False) as file:
            for number, data in enumerate(file, 1):
                if not data.endswith(b"\n"):
                    if not _begins_result(data.rstrip(b"\0")):
                        raise self._foreign(number)
                    break
                self._note(number, data)
                whole += len(data)
        self._size = whole
        if os.fstat(self._fd).st_size > whole:
            os.ftruncate(self._fd, whole)

    def _note(self, number: int, data: bytes) -> None:
        try:
            record = json.loads(data)
            if record["response"] is not None:
                self.finished[record["custom_id"]] = str(record["id"])
                self.num_failed += record["response"]["status_code"] != 200
            else:
                self.bad_lines.add((record["error"]["line"], record["error"]["message"]))
                self.num_failed += 1
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise self._foreign(number) from error

    def _foreign(self, number: int) -> ConfigError:
        return ConfigError(
            f"line {number} of {self._path} is not a result of a batch; give another output, so that nothing is lost."
        )


def _begins_result(data: bytes) -> bool:
    """True if a line of ours, cut anywhere, could look like this."""
    return data.startswith(_BEGINNING[: len(data)])


@dataclass(slots=True)
class BatchCounts:
    """What came of a batch so far, in this run."""

    succeeded: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    errors: dict[str, int] = field(default_factory=dict)

    def note(self, record: Mapping[str, Any]) -> None:
        """One more result."""
        response = record["response"]
        if response is not None and response["status_code"] == 200:
            self.succeeded += 1
            usage = response["body"].get("usage") or {}
            self.prompt_tokens += usage.get("prompt_tokens", 0)
            self.output_tokens += usage.get("completion_tokens", 0)
            return
        self.failed += 1
        message = record["error"]["message"] if response is None else response["body"]["error"]["message"]
        self.errors[message] = self.errors.get(message, 0) + 1


class Batch:
    """Requests of one file, answered by an application. `failure`: how the engine's disk failed, if it ever did."""

    def __init__(
        self, app: FastAPI, host: EngineHost, seed: int = 0, failure: Callable[[], str | None] = lambda: None
    ) -> None:
        self._app = app
        self._host = host
        self._seed = seed
        self._failure = failure
        self._stopping = False
        self._dropping = False

    def stop(self) -> bool:
        """Start no more lines; called again: drop those that run, too. -> True if some are still waited for."""
        self._stopping, self._dropping = True, self._stopping
        return not self._dropping

    async def run(
        self, requests: Path, results: ResultFile, in_flight: int, on_result: Callable[[Mapping[str, Any]], None]
    ) -> None:
        """Answer every line that has no result yet, `in_flight` at a time, unless it is stopped.

        Cancelled, it drops what runs: what an application says to a request that is cancelled is no result. Raises
        CellarError if the engine ends.
        """
        lines = _Lines(line for line in read_requests(requests) if not results.has(line))

        async def work() -> None:
            while not self._stopping:
                async with lines.following() as line:
                    if line is None or self._stopping:
                        break
                    record = bad_result(line) if isinstance(line, BadLine) else await self._answer(line)
                    if self._dropping:
                        break
                    results.append(record)
                    on_result(record)

        workers = [asyncio.create_task(work()) for _ in range(in_flight)]
        try:
            await asyncio.gather(*workers)
        finally:
            self._stopping = self._dropping = True
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _answer(self, request: BatchRequest) -> dict[str, Any]:
        body = dict(request.body)
        if body.get("stream"):
            failure = refused("a batch has no streams; leave stream out.", "stream")
            return _result(request, failure.status, failure.body)
        if body.get("seed") is None and request.url in _SAMPLED:
            body["seed"] = self._seed_of(request.custom_id)
        try:
            data = json.dumps(body).encode()
        except RecursionError:
            failure = refused("the request is nested too deeply; flatten it.")
            return _result(request, failure.status, failure.body)
        status, answer = await call(self._app, request.url, data)
        if status >= 500 and self._host.llm is None and not self._dropping:
            raise CellarError("the engine has failed; what is done is kept, so run the same command again.")
        if status >= 500 and not self._dropping and (why := self._failure()) is not None:
            raise CellarError(f"{why}; what is done is kept, so check the disk and run the same command again.")
        if status == 503 and not self._dropping:  # not the request's fault, so no answer to it
            message = json.loads(answer)["error"]["message"]
            raise CellarError(f"a request was refused ({message.rstrip('.')}); run the same command again.")
        return _result(request, status, json.loads(answer))

    def _seed_of(self, custom_id: str) -> int:
        """Of a request that brings none: the same in every run, whatever was done before."""
        data = f"{self._seed}:{custom_id}".encode(errors="surrogatepass")
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


class _Lines:
    """Lines for all workers, as many at a time as have MOST_BYTES together."""

    def __init__(self, lines: Iterator[BatchRequest | BadLine]) -> None:
        self._lines = lines
        self._nbytes = 0
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[BatchRequest | BadLine | None]:
        """The next line, which is under way until the end of the block; None: there is no other."""
        async with self._turn:
            while self._nbytes >= MOST_BYTES:
                self._freed.clear()
                await self._freed.wait()
            line = next(self._lines, None)
            nbytes = line.nbytes if isinstance(line, BatchRequest) else 0
            self._nbytes += nbytes
        try:
            yield line
        finally:
            self._nbytes -= nbytes
            self._freed.set()


def _line(record: Mapping[str, Any]) -> bytes:
    """Readable where it can be: half a surrogate pair, which JSON allows, has to be escaped."""
    try:
        return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def _result(request: BatchRequest, status: int, body: dict[str, Any]) -> dict[str, Any]:
    response = {"status_code": status, "request_id": body.get("id") or "", "body": body}
    return {"id": request.id, "custom_id": request.custom_id, "response": response, "error": None}


def bad_result(bad: BadLine) -> dict[str, Any]:
    """The result of a line that could not be sent; `line` tells a later run that it is there."""
    error = {"code": bad.code, "message": bad.message, "line": bad.line}
    return {"id": f"{_ID}{uuid.uuid4().hex}", "custom_id": bad.custom_id, "response": None, "error": error}


async def call(app: FastAPI, path: str, body: bytes) -> tuple[int, bytes]:
    """POST to an application in this process; -> status and body."""
    messages: list[Message] = []
    sent = False

    async def receive() -> Message:
        nonlocal sent
        if sent:  # a client that never hangs up
            await asyncio.get_running_loop().create_future()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        messages.append(message)

    try:
        await _asgi(app, path, len(body), receive, send)
    except Exception:  # a defect is answered with a 500, and then raised for the sake of a server's log
        if not messages:
            raise
    start = next(m for m in messages if m["type"] == "http.response.start")
    return start["status"], b"".join(m.get("body", b"") for m in messages if m["type"] == "http.response.body")


async def _asgi(app: FastAPI, path: str, length: int, receive: Receive, send: Send) -> None:
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(length).encode())],
        "client": ("batch", 0),
        "server": ("batch", 0),
    }
    await app(scope, receive, send)
