"""Pages, admin and API in one tree. The order decides: the console's `/` comes last."""

from django.contrib import admin
from django.urls import include, path

from config.reference import ReferenceView

urlpatterns = [
    path("reference/", ReferenceView.as_view(), name="reference"),
    path("admin/", admin.site.urls),
    path("", include("inference.urls")),
    path("", include("console.urls")),
]
