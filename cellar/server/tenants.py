"""What the engine hears of whose a request is: names and salts under which no two owners meet.

An owner is a digest of fixed length (`cellar.server.keys.digest_of`), so what stands behind it cannot pass for
another's. Without one (a server without keys) everything is as its client says.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tenants:
    """`share_prefixes`: KV of equal prefixes is shared among all owners."""

    share_prefixes: bool = False

    def salt(self, owner: str, cache_salt: bytes) -> bytes:
        """The root of the identities of a request's chunks; `cache_salt` is the client's own wish."""
        return cache_salt if self.share_prefixes or not owner else owner.encode() + b"/" + cache_salt

    def conversation(self, owner: str, name: str | None) -> str | None:
        """What the engine calls a conversation of this name; None if it has none."""
        return f"{owner}/{name}" if owner and name is not None else name

    def id(self, owner: str, request_id: str) -> str:
        """What the engine calls a request; clients may choose ids, and another's must not be in use for them."""
        return f"{owner}/{request_id}" if owner else request_id
