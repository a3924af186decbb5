"""Every address of the portal."""

from django.contrib import admin
from django.urls import include, path, re_path

from portal.api.metrics import prometheus
from portal.api.problems import unknown_address
from portal.api.root import api

urlpatterns = [
    path("api/v1/", api.urls),
    re_path(r"^api/", unknown_address),
    path("metrics", prometheus, name="prometheus"),
    path("console/", admin.site.urls),
    path("", include("portal.web.urls")),
]

handler400 = "portal.web.problems.bad_request"
handler403 = "portal.web.problems.forbidden"
handler404 = "portal.web.problems.not_found"
handler500 = "portal.web.problems.server_error"
