"""The node's way to the broker: what it reports goes out here, what it is ordered comes in here, signed both ways.

Every call has a deadline. A broker that is down or refuses raises BrokerDown; the caller keeps what it wanted to send.
"""

import itertools
import time
from collections.abc import Iterable

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from wire import names
from wire.reports import Report
from wire.signing import Action, Signer
from workers.settings import Settings

SOCKET_TIMEOUT_S = 10
CONNECT_TIMEOUT_S = 5


class BrokerDown(Exception):
    """The broker cannot be reached, or does not accept what was sent."""


class Publisher:
    def __init__(self, settings: Settings) -> None:
        self._upstream = names.upstream_key(settings.node)
        self._desired = names.desired_key(settings.node)
        self._signer = Signer(settings.private_key, settings.node)
        self._numbers = itertools.count(first_number())
        self._client = connect(settings.broker_url)

    def send(self, report: Report) -> None:
        self.send_all([report])

    def send_all(self, reports: Iterable[Report]) -> None:
        """In this order, in one round trip. Raises BrokerDown; then any number of them may have arrived."""
        pipeline = self._client.pipeline(transaction=False)
        for report in reports:
            pipeline.xadd(self._upstream, {names.MESSAGE_FIELD: self._seal(report)})
        try:
            pipeline.execute()
        except redis.RedisError as error:
            raise BrokerDown(f"cannot report to the broker: {error}") from error

    def read_desired(self) -> bytes | None:
        """-> the sealed snapshot, None if the broker has none. Raises BrokerDown."""
        try:
            value = self._client.get(self._desired)
        except redis.RedisError as error:
            raise BrokerDown(f"cannot read the desired state from the broker: {error}") from error
        return value if isinstance(value, bytes) else None

    def close(self) -> None:
        self._client.close()

    def _seal(self, report: Report) -> bytes:
        return self._signer.seal(report, audience=names.PORTAL, action=Action.REPORT, epoch=next(self._numbers))


def connect(broker_url: str) -> redis.Redis:
    # One retry, at once: an idle connection that the broker closed is replaced without a report being lost.
    return redis.Redis.from_url(
        broker_url, socket_timeout=SOCKET_TIMEOUT_S, socket_connect_timeout=CONNECT_TIMEOUT_S, socket_keepalive=True,
        health_check_interval=5, retry=Retry(NoBackoff(), 1), client_name=None, decode_responses=False,
    )


def first_number() -> int:
    """Message numbers begin at the boot clock, so that they grow within a boot across restarts of the worker."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000
