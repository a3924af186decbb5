"""The one connection to Redis or Valkey that services share, and sending that never hurts its caller.

What is sent from here is only ever a hint: the truth is in the database, and the periodic passes send it again.
"""

import logging
import time
from collections.abc import Callable
from functools import lru_cache

import redis
from django.conf import settings
from kombu.exceptions import OperationalError

log = logging.getLogger(__name__)

DOWN_ERRORS = (redis.RedisError, OperationalError, OSError)


class Breaker:
    """After a failure, sending is left out for a moment: a dead broker may cost one request 2 s, not every one."""

    pause_s = 1.0

    def __init__(self) -> None:
        self._closed_at = 0.0

    def attempt(self, what: str, send: Callable[[], object]) -> bool:
        if time.monotonic() < self._closed_at:
            return False
        try:
            send()
        except DOWN_ERRORS as error:
            self._closed_at = time.monotonic() + self.pause_s
            log.warning("%s was not sent, the periodic pass makes up for it: %s", what, error)
            return False
        return True


BREAKER = Breaker()


def attempt(what: str, send: Callable[[], object]) -> bool:
    """-> whether it was sent. Never raises because of the broker."""
    return BREAKER.attempt(what, send)


def client() -> redis.Redis:
    return client_for(settings.REDIS_URL)


@lru_cache(maxsize=4)
def client_for(url: str) -> redis.Redis:
    return redis.Redis.from_url(
        url,
        socket_timeout=settings.BROKER_TIMEOUT_S,
        socket_connect_timeout=settings.BROKER_TIMEOUT_S,
        socket_keepalive=True,
        health_check_interval=15,
    )
