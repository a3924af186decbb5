"""Every address of the portal."""

from django.contrib import admin
from django.urls import include, path

from portal.api.root import api

urlpatterns = [
    path("api/v1/", api.urls),
    path("console/", admin.site.urls),
    path("", include("portal.web.urls")),
]
