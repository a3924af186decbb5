"""Names on the broker. Both planes take them from here, so that a rename is one edit."""

import re

PROTOCOL = 1
"""Version of the messages. A peer that speaks another one is refused by name, never guessed at."""

PORTAL = "portal"
"""Audience of everything a node sends, sender of everything a node receives."""

HINT_TASK = "workers.hint"
"""The only Celery task a node registers: «look now»."""

NODE_NAME = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,61}[a-z0-9])?")

INGEST_GROUP = "ingest"
"""Consumer group of the portal on every upward stream."""

MESSAGE_FIELD = b"m"
"""The one field of a stream entry; its value is a signed envelope."""


# The braces are literal: without a closing delimiter an ACL pattern for node1 would also match node10.
def hint_queue(node: str) -> str:
    return f"q.{{{node}}}"


def desired_key(node: str) -> str:
    return f"desired.{{{node}}}"


def upstream_key(node: str) -> str:
    return f"up.{{{node}}}"
