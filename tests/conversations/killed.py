"""A process that works on conversations until it is killed: `python -m tests.conversations.killed PLACE ACKNOWLEDGED`.

Eight threads go on with three conversations each. What has been stored for good is said in a line of the file
ACKNOWLEDGED: conversation and turn. Everything that is stored follows from these two, so that it can be checked.
"""

from __future__ import annotations

import os
import sys
import threading

import numpy as np
import numpy.typing as npt

from cellar.conversations import conversations, responses
from cellar.conversations.errors import Duplicate, StoreUnavailable
from cellar.conversations.records import History, Item, Response, Status, Tokens
from cellar.conversations.store import Store, open_store

THREADS, EACH = 8, 3


def ids_of(conversation: str, turn: int) -> npt.NDArray[np.int32]:
    """What a turn adds."""
    return np.random.default_rng([*conversation.encode(), turn]).integers(0, 50_000, 40, dtype=np.int32)


def item(conversation: str, turn: int, role: str) -> Item:
    """The input or output of a turn."""
    id = f"{conversation}-{turn}-{role}"
    return Item(id, {"id": id, "content": f"{role} says {turn}. " * 20})


def check(conversation: str, history: History) -> int:
    """How many turns a conversation has; all of them are whole, once, in order."""
    turns, odd = divmod(len(history.items), 2)
    assert not odd, f"{conversation} has half a turn"
    expected = [item(conversation, turn, role) for turn in range(turns) for role in ("user", "assistant")]
    assert list(history.items) == expected
    if turns:
        assert history.tokens is not None
        assert history.num_covered == len(history.items)
        whole = np.concatenate([ids_of(conversation, turn) for turn in range(turns)])
        assert np.array_equal(history.tokens.ids, whole)
    return turns


def live(store: Store, conversation: str, owner: str, said: int) -> None:
    """One turn of a conversation, from where it is."""
    history = store.read(conversations.history, owner, conversation)
    turn = check(conversation, history)
    id = f"{conversation}-{turn}-{os.getpid()}"
    begun = Response(
        id, owner, Status.IN_PROGRESS, 0.0, {"turn": turn}, conversation, input=(item(conversation, turn, "user"),)
    )
    store.write(responses.begin, begun)
    base = None if history.tokens is None else history.tokens.base
    tokens = Tokens(ids_of(conversation, turn), base, 20, turn, b"digest")
    output = [item(conversation, turn, "assistant")]
    store.write(responses.finish, owner, id, Status.COMPLETED, {"turn": turn, "done": True}, output, tokens)
    os.write(said, f"{conversation} {turn}\n".encode())


def work(store: Store, k: int, said: int) -> None:
    """Turn after turn of some conversations, until the store is gone."""
    mine = [f"c{k}-{j}" for j in range(EACH)]
    try:
        for conversation in mine:
            try:
                store.write(conversations.create, f"owner{k}", conversation, {})
            except Duplicate:
                continue
        while True:
            for conversation in mine:
                live(store, conversation, f"owner{k}", said)
    except StoreUnavailable:
        return
    except BaseException as error:
        os.write(said, f"! {error!r}\n".replace("\n", " ").encode() + b"\n")
        os._exit(1)


def main() -> None:
    """Until it is killed, or the database is."""
    place, acknowledged = sys.argv[1:]
    said = os.open(acknowledged, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    store = open_store(place, sweep_seconds=0.1)
    threads = [threading.Thread(target=work, args=(store, k, said), daemon=True) for k in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
