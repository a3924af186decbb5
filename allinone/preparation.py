"""What services need before they start: schema, demo people, an enrolled node, static files. Done once."""

import hashlib
import json
import secrets
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from allinone.assets import collected
from allinone.commands import Commands
from allinone.faults import Fault
from allinone.postgres import Postgres
from allinone.valkey import write_private


@dataclass(frozen=True)
class Preparation:
    """People and node are remembered only for an embedded database; another one may have been emptied since."""

    commands: Commands
    postgres: Postgres | None

    def run(self) -> list[str]:
        """-> the logins. Each command starts a Python of its own, so they run side by side."""
        static = collected(self._state_dir)
        with ThreadPoolExecutor(3) as pool:
            tasks: list[Future[object]] = []
            if not static.unchanged():
                tasks.append(pool.submit(self.commands.manage, "collectstatic", "--no-input", "--verbosity", "0"))
            self.commands.manage("migrate", "--no-input", "--verbosity", "0")
            if not self._remembered():
                tasks += [pool.submit(self._make_people), pool.submit(self.commands.join_node)]
            for task in tasks:
                task.result()
        static.remember()
        self._remember()
        return self.logins()

    def logins(self) -> list[str]:
        names = " · ".join(json.loads(self._people_file.read_text()))
        return [f"sign in as {names}", f"password {self._password()}"]

    def forget(self) -> None:
        self._stamp.unlink(missing_ok=True)

    def _make_people(self) -> None:
        password_file = self._state_dir / "demo.password"
        if not password_file.exists():
            write_private(password_file, secrets.token_urlsafe(9))
        answer = self.commands.manage("demo_users", "--password-file", str(password_file))
        try:
            names = [str(login["username"]) for login in json.loads(answer)]
        except (ValueError, KeyError, TypeError) as error:
            raise Fault(f"manage.py demo_users answered no list of logins but: {answer[:200]!r}") from error
        write_private(self._people_file, json.dumps(names))

    def _password(self) -> str:
        return (self._state_dir / "demo.password").read_text()

    def _remembered(self) -> bool:
        return self.postgres is not None and self._stamp.exists() and self._stamp.read_text() == self._identity()

    def _remember(self) -> None:
        write_private(self._stamp, self._identity())

    def _identity(self) -> str:
        """Changes with everything that was told to somebody: the cluster, the broker's address, the node's GPUs."""
        parts = [
            self.commands.redis_url,
            self.commands.database_url,
            self.commands.options.node,
            self.commands.topology(),
        ]
        if self.postgres:
            made = (self.postgres.data_dir / "PG_VERSION").stat()
            parts.append(f"{made.st_ino} {made.st_mtime_ns}")
        parts.append(str(self.commands.node_dir.joinpath("node.json").exists()))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @property
    def _state_dir(self) -> Path:
        return self.commands.options.state_dir

    @property
    def _people_file(self) -> Path:
        return self._state_dir / "demo.people"

    @property
    def _stamp(self) -> Path:
        return self._state_dir / "prepared"
