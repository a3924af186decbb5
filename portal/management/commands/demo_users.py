"""`manage.py demo_users`: three people and a team, for trying the portal out."""

import json
import os
import secrets
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from portal.services import accounts


class Command(BaseCommand):
    help = "Create alice (admin), bob and charlie with the project vision, and print their logins as JSON."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--password-file", type=Path, help="give all three the password that this file holds")

    def handle(self, *_args: Any, **options: Any) -> str:
        given: Path | None = options["password_file"]
        password = read(given or made_up(settings.STATE_DIR / "demo.password"))
        return json.dumps(accounts.demo(password, reset=given is not None))


def made_up(path: Path) -> Path:
    """A file with a password for the demo, the same every time, readable by its owner alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(9))
    return path


def read(path: Path) -> str:
    try:
        password = path.read_text().strip()
    except OSError as error:
        raise CommandError(f"The password file cannot be read: {error}") from error
    if not password:
        raise CommandError(f"{path} is empty. Write a password into it, or remove it.")
    return password
