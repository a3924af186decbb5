"""`manage.py token USER`: prints a token, once."""

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from portal.models import User
from portal.services import tokens
from portal.services.errors import Problem


class Command(BaseCommand):
    help = "Print a new API token of a user. It cannot be shown again."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("user")
        parser.add_argument("--name", default="command line")
        parser.add_argument("--days", type=int, default=tokens.MAX_DAYS)

    def handle(self, *_args: Any, **options: Any) -> str:
        user = User.objects.filter(username=options["user"], is_active=True).first()
        if user is None:
            raise CommandError(f"There is no active user {options['user']}.")
        try:
            return tokens.issue(user, options["name"], options["days"])
        except Problem as problem:
            raise CommandError(problem.detail) from problem
