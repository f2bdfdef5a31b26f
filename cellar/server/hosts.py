"""By which names a server may be called: against pages whose own name resolves to this machine (DNS rebinding).

A browser takes such a page for one of the server's own, so it could ask the server whatever it likes; but the browser
still says by which name it calls, in the Host header.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from cellar.core.errors import ConfigError
from cellar.server.config import ServerConfig
from cellar.server.errors import refused

LOOPBACK = ("localhost", "*.localhost", "127.0.0.1", "::1")


def hosts_of(server: ServerConfig, has_keys: bool) -> tuple[str, ...] | None:
    """The names by which a server may be called, in lower case; None for any. Raises ConfigError.

    Without the option a server that listens on loopback and asks for no key (a foreign page has none) is called by
    loopback's names only. No other server can know its own names.
    """
    if server.allowed_hosts is None:
        return (*LOOPBACK, server.host.lower()) if not has_keys and is_loopback(server.host) else None
    names = tuple(name.strip().strip("[]").lower() for name in server.allowed_hosts.split(",") if name.strip())
    if not names or any(set(name) & set("/ @[]") or "*" in name.removeprefix("*") for name in names):
        raise ConfigError(
            f"allowed_hosts is {server.allowed_hosts!r}; give names or addresses without ports, separated by commas, "
            "*.NAME for all below a name, or * for any."
        )
    return None if "*" in names else names


def is_loopback(host: str) -> bool:
    """True for a name or address that only this machine reaches."""
    name = host.lower().rstrip(".")
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


class AllowedHosts:
    """Answers 400 to requests that call the server by another name than one of `hosts`. Plain ASGI."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self._app = app
        self._names = frozenset(name for name in hosts if not name.startswith("*"))
        self._below = tuple(name[1:] for name in hosts if name.startswith("*"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or refuse."""
        if scope["type"] == "lifespan" or self._known(scope):
            await self._app(scope, receive, send)
            return
        error = refused(
            "this server is not called by the name in the Host header; use one of --allowed-hosts, by default "
            "localhost.",
            code="host_not_allowed",
        )
        await error.response(scope["path"])(scope, receive, send)

    def _known(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"host"]
        if not given:
            return True  # HTTP/1.0, and no browser
        name = name_in(given[0].decode("latin-1"))
        return len(given) == 1 and (name in self._names or name.endswith(self._below))


def name_in(header: str) -> str:
    """The name or address in a Host header, without port and brackets, in lower case."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower().rstrip(".")
