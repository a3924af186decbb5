"""ASGI entry point: `uvicorn portal.asgi:application`."""

import os

from django.conf import settings
from django.core.asgi import get_asgi_application

from portal.web.limits import BodyLimit

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "portal.settings")
application = BodyLimit(get_asgi_application(), settings.MAX_BODY_BYTES)
