"""RoutedRequest: what a router has to know of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cellar.kv.identity import Chain, salted_identity


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """`chunks` are the identities of its leading whole chunks, as the store names them, or none if they are not known.

    `session` names the conversation that it continues (`identity.owner_identity`). At most `max_tokens` answer it.
    """

    prompt_tokens: int
    chunks: Sequence[bytes] = ()
    session: bytes | None = None
    max_tokens: int | None = None

    @classmethod
    def of(
        cls,
        root: bytes,
        salt: bytes,
        tokens: NDArray[np.int32],
        chunk_size: int,
        session: bytes | None = None,
        max_tokens: int | None = None,
    ) -> RoutedRequest:
        """From the prompt's tokens [n]. The last one is always computed, so a chunk that ends with it is left out."""
        count = max(0, len(tokens) - 1) // chunk_size
        chain = Chain(salted_identity(root, salt), chunk_size)
        return cls(len(tokens), tuple(chain.grow(tokens, count)), session, max_tokens)
