"""Pages, admin and API in one tree. The order decides: the console's `/` comes last."""

from django.contrib import admin
from django.urls import include, path

from console.reference.page import reference

handler400 = "config.bad_request.bad_request"
handler404 = "config.not_found.not_found"

urlpatterns = [
    path("reference/", reference, name="reference"),
    path("admin/", admin.site.urls),
    path("api/", include("console.rest.urls")),
    path("", include("inference.urls")),
    path("", include("console.urls")),
]
