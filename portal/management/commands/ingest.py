"""`manage.py ingest`: takes in what the nodes report, until SIGTERM."""

import signal
import threading
from typing import Any

from django.core.management.base import BaseCommand

from portal.services.ingest import Ingest


class Command(BaseCommand):
    help = "Takes in the nodes' reports, log bytes and telemetry. One runs at a time; a second one waits."

    def handle(self, *args: Any, **options: Any) -> None:  # noqa: ARG002
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        self.stdout.write("Ingest is running.")
        self.stdout.flush()
        Ingest().run(stop)
