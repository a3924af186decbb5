"""The database as other processes of a test use it."""

import os
import time
from urllib.parse import urlsplit, urlunsplit

import psycopg
from django.db import connection

DEADLINE_S = 20.0


def database_of_the_tests() -> str:
    parts = urlsplit(os.environ["DATABASE_URL"])
    return urlunsplit(parts._replace(path="/" + str(connection.settings_dict["NAME"])))


def sessions(application: str) -> int:
    """Of the processes that were started with PGAPPNAME=application."""
    with psycopg.connect(os.environ["DATABASE_URL"]) as admin:
        named = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s"
        row = admin.execute(named, [application]).fetchone()
    return int(row[0]) if row else 0


def wait_for_no_sessions(application: str) -> None:
    """A killed client's sessions end a moment after it; a test database in use cannot be dropped."""
    deadline = time.monotonic() + DEADLINE_S
    while sessions(application):
        assert time.monotonic() < deadline
        time.sleep(0.02)
