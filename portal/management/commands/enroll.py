"""`manage.py enroll NAME PUBLIC_KEY`: lets a machine in, and prints what it must know."""

import json
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from portal.services import broker, nodes
from portal.services.errors import Problem


class Command(BaseCommand):
    help = "Enrol a node by the public key that `python -m workers.join` printed. The answer is for `--config -` there."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("name")
        parser.add_argument("public_key", help="64 hexadecimal digits")
        parser.add_argument("--replace", action="store_true", help="give a node that is already enrolled this new key")

    def handle(self, *_args: Any, **options: Any) -> str:
        try:
            known = nodes.enroll(options["name"], options["public_key"], replace=options["replace"])
        except Problem as problem:
            raise CommandError(problem.detail) from problem
        except broker.DOWN_ERRORS as error:
            raise CommandError(f"The broker does not answer: {error}. Start it, then enrol again.") from error
        return json.dumps(known)
