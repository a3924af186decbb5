"""The cast of the portal's tests, seen through pages with their real assets."""

import pytest
from django.core.management import call_command

from tests.portal.conftest import cast

__all__ = ["cast"]


@pytest.fixture(scope="session", autouse=True)
def assets() -> None:
    """Pages name their files by content, so the files must have been collected."""
    call_command("collectstatic", interactive=False, verbosity=0)
