"""URLs of pages, admin and API. The order matters: the console's `/` comes last."""

from django.contrib import admin
from django.urls import include, path

from console.views.reference import reference

handler400 = "config.error_views.bad_request"
handler404 = "config.error_views.not_found"

urlpatterns = [
    path("reference/", reference, name="reference"),
    path("admin/", admin.site.urls),
    path("api/", include("management_api.urls")),
    path("api/", include("kv_map.urls")),
    path("", include("inference.urls")),
    path("", include("console.urls")),
]
