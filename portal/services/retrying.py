"""Two transactions that wait for each other's rows: PostgreSQL ends one of them, which then simply tries again."""

from collections.abc import Callable
from typing import TypeVar

from django.db import OperationalError
from psycopg.errors import DeadlockDetected, SerializationFailure

T = TypeVar("T")
TRIES = 4


def on_deadlock(act: Callable[[], T]) -> T:
    """`act` opens its own transaction, so that a repeat starts clean."""
    for left in range(TRIES - 1, -1, -1):
        try:
            return act()
        except OperationalError as error:
            if not left or not isinstance(error.__cause__, DeadlockDetected | SerializationFailure):
                raise
    raise AssertionError("unreachable")
