"""An envelope is opened only by whom it was meant for, if it is whole, in time, and in a known version."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire import signing
from wire.names import PROTOCOL
from wire.reports import Heartbeat, Report
from wire.signing import Action, Envelope, Opener, Refused, Signer, decode, new_private_key, public_key_of

NODE_KEY, OTHER_KEY = new_private_key(), new_private_key()
NOW = 1_000_000.0
BEAT = Heartbeat(boot_id="b", nonce="n", serial=3, at=NOW, started_at=NOW)


def sealed(
    key: bytes = NODE_KEY, sender: str = "n1", audience: str = "portal", action: Action = Action.REPORT, at: float = NOW
) -> bytes:
    return Signer(key, sender, clock=lambda: at).seal(BEAT, audience=audience, action=action, epoch=7)


def opener(**changes: object) -> Opener:
    asked = {"sender": "n1", "audience": "portal", "action": Action.REPORT, "clock": lambda: NOW} | changes
    return Opener(public_key_of(NODE_KEY), **asked)  # type: ignore[arg-type]


def refusal(message: bytes, **changes: object) -> str:
    with pytest.raises(Refused) as caught:
        opener(**changes).open(message)
    return caught.value.code


def test_what_was_sealed_is_what_is_opened() -> None:
    envelope = opener().open(sealed())
    assert (envelope.epoch, envelope.sender) == (7, "n1")
    assert decode(envelope.body, Report) == BEAT  # type: ignore[arg-type]


def test_another_key_is_refused() -> None:
    assert refusal(sealed(key=OTHER_KEY)) == "bad_signature"


def test_a_message_for_somebody_else_is_refused() -> None:
    assert refusal(sealed(audience="n2")) == "wrong_audience"
    assert refusal(sealed(sender="n10")) == "wrong_audience"


def test_a_hint_is_no_report() -> None:
    assert refusal(sealed(action=Action.HINT)) == "wrong_action"


@pytest.mark.parametrize(("at", "code"), [(NOW - 121, "expired"), (NOW + 121, "clock_skew")])
def test_old_and_future_messages_are_refused(at: float, code: str) -> None:
    assert refusal(sealed(at=at)) == code


def test_a_report_may_wait_in_a_spool_for_days() -> None:
    assert opener(lifetime_s=None).open(sealed(at=NOW - 9e5)).epoch == 7


def test_another_protocol_is_named_not_guessed_at() -> None:
    raw = msgspec.msgpack.encode(Envelope(PROTOCOL + 1, "n1", "portal", "report", 1, "x", NOW, b""))
    signature = Signer(NODE_KEY, "n1")._key.sign(raw)
    assert refusal(msgspec.msgpack.encode((raw, signature))) == "unsupported_version"


@given(st.binary(max_size=200))
def test_garbage_is_refused_and_never_raises_anything_else(garbage: bytes) -> None:
    assert refusal(garbage) in {"malformed", "bad_signature"}


@given(st.data())
def test_no_flipped_bit_passes(data: st.DataObject) -> None:
    message = bytearray(sealed())
    at = data.draw(st.integers(0, len(message) * 8 - 1))
    message[at // 8] ^= 1 << at % 8
    assert refusal(bytes(message)) in {"malformed", "bad_signature"}


@given(
    st.recursive(
        st.none() | st.integers(-5, 5) | st.binary(max_size=5) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=4),
        max_leaves=8,
    )
)
def test_signed_nonsense_is_refused_as_malformed_or_by_name(body: object) -> None:
    raw = msgspec.msgpack.encode(body)
    message = msgspec.msgpack.encode((raw, Signer(NODE_KEY, "n1")._key.sign(raw)))
    assert refusal(message) in {"malformed", "unsupported_version", "wrong_audience"}


def test_unknown_fields_are_ignored_and_unknown_messages_refused() -> None:
    fields = msgspec.to_builtins(BEAT) | {"added_in_a_later_version": 1}
    assert decode(msgspec.msgpack.encode(fields), Report) == BEAT  # type: ignore[arg-type]
    with pytest.raises(Refused):
        signing.decode(msgspec.msgpack.encode({"type": "self_destruct"}), Report)  # type: ignore[arg-type]
