from __future__ import annotations

from tests.conversations.conftest import postgres

__all__ = ["postgres"]
