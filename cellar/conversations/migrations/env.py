"""Run by alembic: migrates over the connection that `cellar.conversations.migrate` hands in."""

from __future__ import annotations

from alembic import context

from cellar.conversations.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
