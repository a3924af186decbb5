"""The signed envelope. Broker access alone starts nothing: a reader checks who signed, for whom, which act, and when.

Layout on the wire: msgpack of `[body, signature]`, `body` being msgpack of `Envelope`. The signature covers the body's
bytes, so nothing that is read is outside it.
"""

import secrets
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Any, TypeVar

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from wire.names import PROTOCOL

LIFETIME_S = 120.0
"""How far an envelope's time may lie from the reader's clock, in either direction."""

T = TypeVar("T")


class Action(StrEnum):
    DESIRED = "desired"
    HINT = "hint"
    REPORT = "report"


class Envelope(msgspec.Struct, array_like=True):
    protocol: int
    sender: str
    audience: str
    action: str
    epoch: int  # of the sender: a snapshot's serial, or a report's sequence number within its boot
    nonce: str
    issued_at: float
    body: bytes


class Refused(Exception):
    """An envelope that may not be acted upon.

    `code`: bad_signature, wrong_audience, wrong_action, expired, clock_skew, unsupported_version or malformed.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def new_private_key() -> bytes:
    """-> 32 raw bytes of an Ed25519 private key."""
    return Ed25519PrivateKey.generate().private_bytes_raw()


def public_key_of(private_key: bytes) -> bytes:
    """-> 32 raw bytes."""
    return Ed25519PrivateKey.from_private_bytes(private_key).public_key().public_bytes_raw()


class Signer:
    def __init__(self, private_key: bytes, sender: str, clock: Callable[[], float] = time.time) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(private_key)
        self._sender = sender
        self._clock = clock

    def seal(self, body: Any, *, audience: str, action: Action, epoch: int) -> bytes:
        envelope = Envelope(
            PROTOCOL,
            self._sender,
            audience,
            action,
            epoch,
            secrets.token_urlsafe(12),
            self._clock(),
            msgspec.msgpack.encode(body),
        )
        raw = msgspec.msgpack.encode(envelope)
        return msgspec.msgpack.encode((raw, self._key.sign(raw)))


class Opener:
    """Opens what one sender addressed to one audience. `lifetime_s=None` for reports, which may wait in a spool."""

    def __init__(
        self,
        public_key: bytes,
        *,
        sender: str,
        audience: str,
        action: Action,
        lifetime_s: float | None = LIFETIME_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._key = Ed25519PublicKey.from_public_bytes(public_key)
        self._sender, self._audience, self._action = sender, audience, action
        self._lifetime_s, self._clock = lifetime_s, clock

    def open(self, sealed: bytes) -> Envelope:
        """-> the envelope, its body still encoded. Raises Refused."""
        envelope = self._verified(sealed)
        if envelope.audience != self._audience or envelope.sender != self._sender:
            raise Refused(
                "wrong_audience",
                f"from {envelope.sender!r} to {envelope.audience!r}, "
                f"expected from {self._sender!r} to {self._audience!r}",
            )
        if envelope.action != self._action:
            raise Refused("wrong_action", f"{envelope.action!r} where {self._action.value!r} was expected")
        self._check_time(envelope.issued_at)
        return envelope

    def _verified(self, sealed: bytes) -> Envelope:
        try:
            raw, signature = msgspec.msgpack.decode(sealed, type=tuple[bytes, bytes])
        except msgspec.MsgspecError as error:
            raise Refused("malformed", f"not an envelope: {error}") from error
        try:
            self._key.verify(signature, raw)
        except InvalidSignature as error:
            raise Refused("bad_signature", f"not signed by {self._sender}") from error
        try:
            protocol = msgspec.msgpack.decode(raw, type=list)[0]
            if protocol != PROTOCOL:
                raise Refused("unsupported_version", f"protocol {protocol}, this side speaks {PROTOCOL}")
            return msgspec.msgpack.decode(raw, type=Envelope)
        except (msgspec.MsgspecError, IndexError) as error:
            raise Refused("malformed", f"not an envelope: {error}") from error

    def _check_time(self, issued_at: float) -> None:
        if self._lifetime_s is None:
            return
        age_s = self._clock() - issued_at
        if age_s > self._lifetime_s:
            raise Refused("expired", f"{age_s:.0f} s old, at most {self._lifetime_s:.0f} s are accepted")
        if age_s < -self._lifetime_s:
            raise Refused("clock_skew", f"dated {-age_s:.0f} s ahead of this clock")


def decode(body: bytes, kind: type[T]) -> T:
    """Body bytes -> message. Unknown fields are ignored, an unknown or ill-formed message raises Refused."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise Refused("malformed", str(error)) from error
