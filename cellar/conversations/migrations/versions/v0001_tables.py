"""Threads, responses, items, events."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "threads",
        sa.Column("id", sa.String(128), primary_key=True),
        sa.Column("owner", sa.String(128), nullable=False),
        sa.Column("is_conversation", sa.Boolean, nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("active_at", sa.Float(53), nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("metadata", sa.Text, nullable=False),
        sa.Column("next_position", sa.Integer, nullable=False),
        sa.Column("head", sa.String(128)),
        sa.Column("head_until", sa.Integer, nullable=False),
        sa.Column("running", sa.String(128)),
    )
    op.create_index("threads_by_activity", "threads", ["active_at", "size"])
    op.create_index("threads_of_owner", "threads", ["owner", "is_conversation", "active_at", "id"])
    op.create_table(
        "responses",
        sa.Column("id", sa.String(128), primary_key=True),
        sa.Column("owner", sa.String(128), nullable=False),
        sa.Column("thread", sa.String(128), sa.ForeignKey("threads.id", ondelete="CASCADE"), nullable=False),
        sa.Column("in_conversation", sa.Boolean, nullable=False),
        sa.Column("until", sa.Integer, nullable=False),
        sa.Column("previous", sa.String(128)),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("worker", sa.String(32)),
        sa.Column("background", sa.Boolean, nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("base", sa.String(128)),
        sa.Column("ids", sa.LargeBinary),
        sa.Column("num_answer", sa.Integer, nullable=False),
        sa.Column("text_length", sa.Integer, nullable=False),
        sa.Column("text_digest", sa.LargeBinary, nullable=False),
        sa.Column("is_deleted", sa.Boolean, nullable=False),
    )
    op.create_index("responses_of_thread", "responses", ["thread"])
    op.create_index("responses_by_worker", "responses", ["worker"])
    op.create_index("responses_by_previous", "responses", ["previous"])
    op.create_table(
        "items",
        sa.Column("key", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(128), nullable=False),
        sa.Column("thread", sa.String(128), sa.ForeignKey("threads.id", ondelete="CASCADE"), nullable=False),
        sa.Column("position", sa.Integer),
        sa.Column("response", sa.String(128)),
        sa.Column("is_output", sa.Boolean, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.UniqueConstraint("thread", "position", name="items_of_conversation"),
    )
    op.create_index("items_by_id", "items", ["thread", "id"])
    op.create_index("items_of_response", "items", ["response"])
    op.create_table(
        "events",
        sa.Column("response", sa.String(128), sa.ForeignKey("responses.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )
