"""Items are found by their ids alone, too, without a look into each thread of their owner."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """The index begins with the id."""
    op.drop_index("items_by_id", "items")
    op.create_index("items_by_id", "items", ["id", "thread"])
