"""Bring a database to the tables of this version."""

from __future__ import annotations

import logging

from alembic import command
from alembic.config import Config
from alembic.util.exc import CommandError
from sqlalchemy import Connection, text

from cellar.core.errors import ConfigError

_MIGRATING = 0x63656C6C6172  # an advisory lock of PostgreSQL


def migrate(connection: Connection) -> None:
    """Within the connection's transaction; processes that do so at once wait for each other.

    Raises ConfigError if a newer version has been here.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATING})
    logging.getLogger("alembic").setLevel(logging.WARNING)  # it announces itself at every start
    config = Config()
    config.set_main_option("script_location", "cellar.conversations:migrations")
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise ConfigError(
            f"the conversation store was written by another version of Cellar ({error}); use that version, "
            "or another data directory."
        ) from error
