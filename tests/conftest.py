"""What every test may ask for: a real PostgreSQL, a real Valkey, people, nodes.

Addresses are known before anything runs, since Django reads its settings when it is first imported; PostgreSQL starts
when the first test needs it. DATABASE_URL and REDIS_URL use other servers.
"""

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import django
import django.conf
import pytest
import redis
from django.core.management import call_command

from allinone.postgres import Postgres
from allinone.valkey import Valkey

HOME = Path(tempfile.mkdtemp(prefix="gpuyard-tests-"))
HOME.chmod(0o711)
atexit.register(shutil.rmtree, HOME, ignore_errors=True)

POSTGRES = None if os.environ.get("DATABASE_URL") else Postgres(HOME / "pg", durable=False)
VALKEY = None if os.environ.get("REDIS_URL") else Valkey(HOME / "valkey")
if POSTGRES:
    os.environ["DATABASE_URL"] = POSTGRES.url
if VALKEY:
    os.environ["REDIS_URL"] = VALKEY.start()
    atexit.register(VALKEY.stop)
os.environ["GPUYARD_STATE_DIR"] = str(HOME / "state")
(HOME / "state" / "static").mkdir(parents=True)  # where collectstatic would write
os.environ["DJANGO_SETTINGS_MODULE"] = "portal.settings"
django.setup()  # the conftest of a folder may be read before pytest-django does this
# Real hashing takes a quarter of a second a person, and there are three of them in every test.
django.conf.settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]


@pytest.fixture(scope="session")
def django_db_modify_db_settings() -> Iterator[None]:
    """Runs before the test database is made: the server must be there."""
    if POSTGRES is None:
        yield
        return
    POSTGRES.start()
    yield
    POSTGRES.stop()


@pytest.fixture(scope="session")
def assets() -> None:
    """Pages name their files by content, so the files must have been collected."""
    call_command("collectstatic", interactive=False, verbosity=0)


@pytest.fixture
def broker_url() -> Iterator[str]:
    """An empty broker, with no users but the portal's."""
    url = os.environ["REDIS_URL"]
    client = redis.Redis.from_url(url)
    client.flushall()
    for user in client.acl_users():
        if user != "default":
            client.acl_deluser(user)
    yield url
    client.close()
