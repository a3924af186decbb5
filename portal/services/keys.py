"""The portal's own key. It signs every order to a node; whoever has it can start processes on all of them."""

import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from django.conf import settings

from wire.names import PORTAL
from wire.signing import Signer, new_private_key, public_key_of

KEY_BYTES = 32


def signer() -> Signer:
    return Signer(private_key(settings.SIGNING_KEY_FILE), PORTAL)


def public_key_hex() -> str:
    return public_key_of(private_key(settings.SIGNING_KEY_FILE)).hex()


@lru_cache(maxsize=2)
def private_key(path: Path) -> bytes:
    """Made by the first process that asks; the file appears whole or not at all, so two of them agree."""
    if not path.exists():
        make(path)
    key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise OSError(f"{path} is not a key of {KEY_BYTES} bytes. Restore it, or remove it and enrol every node anew.")
    return key


def make(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(new_private_key())
        file.flush()
        os.fsync(file.fileno())
    with suppress(FileExistsError):  # another process was first; its key counts
        os.link(draft, path)
    draft.unlink()
