"""«Something changed», told to whoever is watching. Losing one is harmless: watchers also look by themselves."""

import json
from functools import partial
from typing import Any

from django.db import transaction

from portal.services import broker

CLUSTER = "live.cluster"


def job_channel(job_id: int) -> str:
    return f"live.job.{job_id}"


def notify(channel: str, kind: str, **data: Any) -> None:
    """Publish once the transaction has committed. Never raises."""
    notify_all([channel], kind, **data)


def notify_all(channels: list[str], kind: str, **data: Any) -> None:
    message = json.dumps({"kind": kind, **data}, default=str)
    transaction.on_commit(partial(broker.attempt, "a live notice", partial(publish, channels, message)), robust=True)


def publish(channels: list[str], message: str) -> None:
    with broker.client().pipeline(transaction=False) as pipeline:
        for channel in channels:
            pipeline.publish(channel, message)
        pipeline.execute()
