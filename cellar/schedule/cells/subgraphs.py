"""Subgraphs: the state of all running subgraphs as a struct of arrays."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from cellar.schedule.cells.queue import IndexArray

FREE = -1
"""Owner of a slot that belongs to nobody."""


class State(IntEnum):
    """Rows of `Subgraphs.state`; those of `values` follow."""

    AT = 0
    END = 1
    NODES = 2
    LEFT = 3
    UNCOMMITTED = 4
    READY = 5
    WAITS = 6
    HOME = 7
    OWNER = 8
    LOOP = 9
    GROWN = 10
    STOP = 11
    STOP_OUTPUT = 12
    DEAD = 13
    KIND = 14
    DEST = 15
    SIBLINGS = 16
    RUN = 17


class Subgraphs:
    """One slot per subgraph of an admitted request; a field is a row of `state`, int64 [State, slots].

    The fields, which `State` numbers:

    at           row of the cell's table at which it stands: its next node
    end          row behind its last
    nodes        how many nodes it has (growing: at most)
    left         nodes not yet submitted; in flight are `uncommitted - left`
    uncommitted  nodes not yet committed
    ready        nodes that could be submitted now
    waits        nodes of other subgraphs that must commit before it is queued
    home         the worker that holds the rows of its request, and runs all its nodes
    owner        serial number of its request, or FREE
    loop         how many of its last rows repeat
    grown        growing: steps submitted
    stop, stop_output  the symbol that ends it, and of which output
    dead         1: ended early, some node still in flight
    kind         number of its cell type
    dest         first place of its request in the outbox of its type
    siblings     where the slots of its request's subgraphs begin in the store of slots
    run          where the rows of its request begin in the store of rows
    values[b]    where the values of its request in bank b begin in their store
    """

    at: IndexArray
    end: IndexArray
    nodes: IndexArray
    left: IndexArray
    uncommitted: IndexArray
    ready: IndexArray
    waits: IndexArray
    home: IndexArray
    owner: IndexArray
    loop: IndexArray
    grown: IndexArray
    stop: IndexArray
    stop_output: IndexArray
    dead: IndexArray
    kind: IndexArray
    dest: IndexArray
    siblings: IndexArray
    run: IndexArray

    def __init__(self, num_banks: int, room: int = 1024) -> None:
        self.num_dead = 0
        self.num_fields = len(State) + num_banks
        self._set(np.zeros((self.num_fields, room), np.int64))
        self.owner[:] = FREE
        self._free: IndexArray = np.arange(room - 1, -1, -1)
        self._num_free = room

    def _set(self, state: IndexArray) -> None:
        self.state = state
        for field in State:
            setattr(self, field.name.lower(), state[field])
        self.values = list(state[len(State) :])

    @property
    def num_used(self) -> int:
        """Slots that belong to a request."""
        return len(self.owner) - self._num_free

    def take(self, count: int) -> IndexArray:
        """Slots for `count` subgraphs; every field is to be set by the caller."""
        while self._num_free < count:
            self._double()
        self._num_free -= count
        return self._free[self._num_free : self._num_free + count].copy()

    def give(self, slots: IndexArray) -> None:
        """Slots that no task in flight names are free again."""
        self.owner[slots] = FREE
        self._free[self._num_free : self._num_free + len(slots)] = slots
        self._num_free += len(slots)

    def _double(self) -> None:
        room = len(self.owner)
        self._set(np.concatenate([self.state, np.zeros_like(self.state)], axis=1))
        self.owner[room:] = FREE
        free = np.empty(2 * room, np.int64)
        free[: self._num_free] = self._free[: self._num_free]
        free[self._num_free : self._num_free + room] = np.arange(2 * room - 1, room - 1, -1)
        self._free = free
        self._num_free += room
