"""TLS: the certificate and its key, looked at before anything else is started."""

from __future__ import annotations

import ssl

from cellar.core.errors import ConfigError
from cellar.server.config import ServerConfig


def scheme_of(server: ServerConfig) -> str:
    """What addresses of the server begin with."""
    return "http" if server.ssl_certfile is None else "https"


def check_certificate(server: ServerConfig) -> None:
    """Raise ConfigError if there is a certificate that cannot be served with its key."""
    tls_of(server)


def tls_of(server: ServerConfig) -> ssl.SSLContext | None:
    """What a server's connections speak; None: plain text. Raises ConfigError, see `check_certificate`."""
    if server.ssl_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    key = server.ssl_keyfile or server.ssl_certfile
    try:
        # Without a password of ours OpenSSL would ask the terminal for one.
        context.load_cert_chain(server.ssl_certfile, key, password="")
    except (OSError, ValueError) as error:
        reason = str(error).strip().rstrip(".") or type(error).__name__
        raise ConfigError(
            f"TLS cannot be served with ssl_certfile {server.ssl_certfile} and key {key} ({reason}); "
            "give a certificate and its key as PEM files, the key without a password."
        ) from error
    return context
