"""The cast of the portal's tests, seen through pages with their real assets."""

import pytest

from tests.portal.conftest import cast

__all__ = ["cast"]


@pytest.fixture(autouse=True)
def _with_assets(assets: None) -> None:
    pass
