"""Streams of several GPUs, simulated: what their hosts have queued is done in any order that CUDA allows.

One piece of work at a time is done, by a stream or by a host that queues the next: a copy is two pieces, a kernel one.
Memory is memory of this process, and addresses are its own; what lies outside of what was lent is refused. Operations
of torch that a host begins are kernels too: they read and write when the stream comes to them.
"""

from __future__ import annotations

import ctypes
import enum
import random
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cellar.ops.added import added_rms_norm

Work = Callable[[], object]


class Stalled(Exception):
    """Work is left, and nobody can go on."""


class Astray(Exception):
    """An address that lies in no memory."""


class Done(enum.Enum):
    """What somebody did who had a turn. `NEWS`: something that others may have waited for."""

    NOTHING = enum.auto()
    WORK = enum.auto()
    NEWS = enum.auto()


class Actor(Protocol):
    """A stream or a host."""

    def advance(self) -> Done:
        """Do the next piece, if there is one that can be done."""


@dataclass(slots=True)
class Mark:
    """A place in a stream: whether it has come there."""

    passed: bool = False


@dataclass(frozen=True, slots=True)
class Write:
    """A number for others, an int32."""

    address: int
    value: int


@dataclass(frozen=True, slots=True)
class Wait:
    """A stream goes on when it is over."""

    over: Callable[[], bool]


Queue = deque[Work | Mark | Write | Wait]


class Event:
    """As CUDA's: waiting for it is waiting for what was recorded last when the wait was asked for."""

    def __init__(self) -> None:
        self.mark: Mark | None = None

    def record(self, stream: Stream) -> None:
        self.mark = Mark()
        stream.queue.append(self.mark)


class Unrecorded(Event):
    """An event that is never recorded, so that nobody waits for it."""

    def record(self, stream: Stream) -> None:
        """Nothing."""


class Stream:
    """A queue of rank `rank`, worked off from its front. `is_callers`: what its host has without asking."""

    def __init__(self, rank: int, handle: int, queue: Queue, is_callers: bool = False) -> None:
        self.rank = rank
        self.cuda_stream = handle
        self.is_callers = is_callers
        self.queue = queue

    def wait_event(self, event: Event) -> None:
        if (mark := event.mark) is not None:
            self.queue.append(Wait(lambda: mark.passed))

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)

    def advance(self) -> Done:
        if not self.queue:
            return Done.NOTHING
        first = self.queue[0]
        if isinstance(first, Wait):
            if not first.over():
                return Done.NOTHING
            self.queue.popleft()
            return Done.WORK
        self.queue.popleft()
        if isinstance(first, Mark):
            first.passed = True
        elif isinstance(first, Write):
            number_at(first.address).value = first.value
        else:
            first()
            return Done.WORK
        return Done.NEWS


class Host:
    """The thread of a rank's host, which queues more each time that it is asked to."""

    def __init__(self, program: Iterator[None], queued: Queued) -> None:
        self._program = program
        self._queued = queued
        self.has_ended = False

    def advance(self) -> Done:
        if not self.has_ended:
            with self._queued:
                self.has_ended = next(self._program, self) is self
        return Done.NOTHING if self.has_ended else Done.NEWS


class Queued(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What rank `rank` asks of torch inside is queued where its machine is at, and has NaN for a result until then.

    Views and new memory are there at once.
    """

    def __init__(self, machine: Machine, rank: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._machine = machine
        self._rank = rank

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view or func in _NEW:
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            self._machine.launch(self._rank, lambda: func(*args, **kwargs))
            return kwargs.get("out", args[0])
        found = func(*args, **kwargs).fill_(torch.nan)
        self._machine.launch(self._rank, lambda: found.copy_(func(*args, **kwargs)))
        return found


_NEW = (torch.ops.aten.full_like.default,)


class Machine:
    """The GPUs of `ranks` ranks, and in `cuda` and its methods what micro-batches use of CUDA.

    `one_queue`: all streams of a GPU share one, so that a stream also waits for what others have asked for before.
    """

    def __init__(self, ranks: int, one_queue: bool = False) -> None:
        self.streams: list[Stream] = []
        self._lent: list[tuple[int, int, Tensor]] = []
        self._shared: list[Queue] | None = [deque() for _ in range(ranks)] if one_queue else None
        self.current = [self._new(rank, is_callers=True) for rank in range(ranks)]
        self.cuda = SimpleNamespace(
            Event=Event,
            Stream=lambda device, priority=0: self._new(device.index),
            current_stream=lambda device: self.current[device.index],
            stream=self.using,
            is_current_stream_capturing=lambda: False,
        )

    def _new(self, rank: int, is_callers: bool = False) -> Stream:
        made = Stream(rank, len(self.streams), deque() if self._shared is None else self._shared[rank], is_callers)
        self.streams.append(made)
        return made

    def lend(self, memory: Tensor) -> int:
        """Let streams reach it, as long as the machine is there; -> its address."""
        address = memory.data_ptr()
        insort(self._lent, (address, address + memory.nbytes, memory), key=itemgetter(0))
        return address

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        """What its host queues inside goes there."""
        before, self.current[stream.rank] = self.current[stream.rank], stream
        yield
        self.current[stream.rank] = before

    def launch(self, rank: int, kernel: Work) -> None:
        """Behind what the rank's current stream has."""
        self.current[rank].queue.append(kernel)

    def copy_far(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """In two halves."""
        self._check(target, nbytes)
        self._check(source, nbytes)
        half = nbytes // 2
        self.streams[stream].queue += (
            lambda: move(target, source, half),
            lambda: move(target + half, source + half, nbytes - half),
        )

    def write(self, stream: int, address: int, value: int) -> None:
        """An int32."""
        self._check(address, 4)
        self.streams[stream].queue.append(Write(address, value))

    def wait_for(self, stream: int, address: int, value: int) -> None:
        """Until the int32 is as large."""
        self._check(address, 4)
        number = number_at(address)
        self.streams[stream].queue.append(Wait(lambda: number.value >= value))

    def added_rms_norm(
        self,
        own: Tensor,
        others: Tensor,
        rank: int,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        normed: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """As one kernel."""
        total = torch.full_like(own, torch.nan)

        def kernel() -> None:
            _, found = added_rms_norm(own, others, rank, residual, weight, eps, normed)
            total.copy_(found)

        self.launch(rank, kernel)
        return normed, total

    def run(self, programs: Sequence[Iterator[None]], dice: random.Random, restless: float, ahead: bool) -> None:
        """Do all that the hosts of ranks queue, in an order by the dice. Raises Stalled.

        Who stands in front goes on while it can; `restless` is how often somebody is put to the front or the back.
        `ahead`: hosts queue everything before anything is done.
        """
        hosts = [Host(program, Queued(self, rank)) for rank, program in enumerate(programs)]
        if ahead:
            for host in hosts:
                while host.advance() is not Done.NOTHING:
                    pass
        order: list[Actor] = [*self.streams, *hosts]
        dice.shuffle(order)
        last, front = len(order) - 1, 0
        while True:
            if dice.random() < restless:
                moved = order.pop(dice.randint(0, last))
                order.insert(dice.choice((0, last)), moved)
                front = 0
            for at in range(front, last + 1):
                done = order[at].advance()
                if done is not Done.NOTHING:
                    front = 0 if done is Done.NEWS else at  # without news, those before it wait still
                    break
            else:
                break
        left = [(stream.rank, stream.cuda_stream, len(stream.queue)) for stream in self.streams if stream.queue]
        if left:
            raise Stalled(f"(rank, stream, pieces of work): {left}")

    def _check(self, address: int, nbytes: int) -> None:
        at = bisect_right(self._lent, address, key=itemgetter(0)) - 1
        if at < 0 or address + nbytes > self._lent[at][1]:
            raise Astray(f"{nbytes} bytes at {address:#x}")


def move(target: int, source: int, nbytes: int) -> None:
    """Within this process."""
    ctypes.memmove(target, source, nbytes)


def number_at(address: int) -> ctypes.c_int32:
    """That lies there."""
    return ctypes.c_int32.from_address(address)


def bytes_at(address: int, nbytes: int) -> NDArray[np.uint8]:
    """That lie there, as libraries hand them to each other."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
