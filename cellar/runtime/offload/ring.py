"""A ring of slots, and the loader thread that fills them with layer after layer, ahead of the computation.

    free slot -> [loader thread: fill] -> loaded, in order -> take(j) -> [compute] -> give -> free slot

`fill` may return while bytes are still on their way: the loader goes on with the next free slot, and `take` waits.
The loader goes round: after the last layer comes the first one of the next pass. A pass that ended early leaves the
wrong layers loaded; `begin` then lets go of them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from cellar.core.errors import DeviceError, IntegrityError
from cellar.runtime.offload.mover import Fence, opened

Fill = Callable[[int, int], Fence]
"""Fill slot s with layer j: fill(s, j); the fence is for whoever computes on it."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    slot: int
    layer: int
    fence: Fence


class WeightRing:
    """`num_slots` slots for the `layers`, which are taken in this order in each pass.

    `wait_seconds`: how long `take` has waited in all. One thread takes and gives.
    """

    def __init__(self, layers: Sequence[int], num_slots: int, fill: Fill) -> None:
        self._layers = tuple(layers)
        self._fill = fill
        self._changed = threading.Condition()
        self._free: deque[tuple[int, Fence]] = deque((slot, opened) for slot in range(num_slots))
        self._loaded: deque[_Loaded] = deque()
        self._next = 0
        self._filling: int | None = None
        self._round = 0
        self._error: Exception | None = None
        self._closed = False
        self.wait_seconds = 0.0
        self._thread = threading.Thread(target=self._load_all, name="cellar-weights", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """A pass begins: the first layer comes next, and what failed is tried again."""
        with self._changed:
            coming = self._loaded[0].layer if self._loaded else self._filling
            if coming is None:
                coming = self._layers[self._next]
            if coming != self._layers[0] or self._error is not None:
                self._round += 1
                self._free.extend((one.slot, _settled(one.fence)) for one in self._loaded)
                self._loaded.clear()
                self._next, self._filling, self._error = 0, None, None
                self._changed.notify_all()

    def take(self, layer: int) -> int:
        """The slot with this layer, once it is there. Raises what the loader met, or IntegrityError for a layer that
        is not the next.
        """
        begin = time.perf_counter()
        with self._changed:
            while not self._loaded and self._error is None and not self._closed:
                self._changed.wait()
            if self._closed:
                raise DeviceError("the runtime is closed; open a new one.")
            if not self._loaded:
                assert self._error is not None
                raise self._error
            found = self._loaded.popleft()
            if found.layer != layer:
                self._free.append((found.slot, _settled(found.fence)))
                raise IntegrityError(f"layer {layer} is to be computed, but the next slot holds layer {found.layer}")
        try:
            found.fence()
        except Exception as caught:
            with self._changed:
                self._free.append((found.slot, _settled(found.fence)))
                self._error = caught
            raise
        self.wait_seconds += time.perf_counter() - begin
        return found.slot

    def give(self, slot: int, fence: Fence = opened) -> None:
        """The slot may be filled again, behind `fence`."""
        with self._changed:
            self._free.append((slot, fence))
            self._changed.notify_all()

    def close(self) -> None:
        """End the loader, after the layer that it is at."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _load_all(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (not self._free or self._error is not None):
                    self._changed.wait()
                if self._closed:
                    return
                slot, fence = self._free.popleft()
                layer, now = self._layers[self._next], self._round
                self._next = (self._next + 1) % len(self._layers)
                self._filling = layer
            error: Exception | None = None
            ready = opened
            try:
                fence()
                ready = self._fill(slot, layer)
            except Exception as caught:
                error = caught
            with self._changed:
                if now == self._round:
                    self._filling = None
                    self._error = error
                    if error is None:
                        self._loaded.append(_Loaded(slot, layer, ready))
                if now != self._round or error is not None:
                    self._free.append((slot, _settled(ready)))
                self._changed.notify_all()


def _settled(fence: Fence) -> Fence:
    """Behind what `fence` is behind, whether it failed or not: nobody wants it any more, but its slot is written to."""

    def over() -> None:
        with suppress(DeviceError):
            fence()

    return over
