"""The tables, for SQLAlchemy Core. `migrations/` makes them; a test holds that both agree.

A thread is a conversation or a chain of responses with its forks: what is bounded, aged and deleted as a whole.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

metadata = MetaData()

_Key = BigInteger().with_variant(Integer, "sqlite")

threads = Table(
    "threads",
    metadata,
    Column("id", String(128), primary_key=True),
    Column("owner", String(128), nullable=False),
    Column("is_conversation", Boolean, nullable=False),
    Column("created_at", Float(53), nullable=False),
    Column("active_at", Float(53), nullable=False),
    Column("size", BigInteger, nullable=False),  # bytes of bodies, ids and events
    Column("metadata", Text, nullable=False),
    Column("next_position", Integer, nullable=False),  # of the conversation's items
    Column("head", String(128)),
    Column("head_until", Integer, nullable=False),
    Column("running", String(128)),  # the response that is being made in the conversation
    Index("threads_by_activity", "active_at", "size"),
    Index("threads_of_owner", "owner", "is_conversation", "active_at", "id"),
)

responses = Table(
    "responses",
    metadata,
    Column("id", String(128), primary_key=True),
    Column("owner", String(128), nullable=False),
    Column("thread", String(128), ForeignKey("threads.id", ondelete="CASCADE"), nullable=False),
    Column("in_conversation", Boolean, nullable=False),
    Column("until", Integer, nullable=False),  # the conversation's next position when this turn ended
    Column("previous", String(128)),
    Column("status", String(16), nullable=False),
    Column("worker", String(32)),  # who makes it, until it has ended
    Column("background", Boolean, nullable=False),
    Column("created_at", Float(53), nullable=False),
    Column("body", Text, nullable=False),
    Column("base", String(128)),
    Column("ids", LargeBinary),  # int32, little-endian
    Column("num_answer", Integer, nullable=False),
    Column("text_length", Integer, nullable=False),
    Column("text_digest", LargeBinary, nullable=False),
    Column("is_deleted", Boolean, nullable=False),  # kept for those that go on from it
    Index("responses_of_thread", "thread"),
    Index("responses_by_worker", "worker"),
    Index("responses_by_previous", "previous"),
)

items = Table(
    "items",
    metadata,
    Column("key", _Key, primary_key=True, autoincrement=True),
    Column("id", String(128), nullable=False),
    Column("thread", String(128), ForeignKey("threads.id", ondelete="CASCADE"), nullable=False),
    Column("position", Integer),  # in the conversation; NULL if it is in none, or not yet
    Column("response", String(128)),  # whose turn it belongs to
    Column("is_output", Boolean, nullable=False),
    Column("body", Text, nullable=False),
    UniqueConstraint("thread", "position", name="items_of_conversation"),
    Index("items_by_id", "id", "thread"),
    Index("items_of_response", "response"),
)

events = Table(
    "events",
    metadata,
    Column("response", String(128), ForeignKey("responses.id", ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("data", LargeBinary, nullable=False),
)
