"""What lies below `/console/models/`."""

from django.urls import path

from console.views import models as deeds
from console.views import models as views

urlpatterns = [
    path("add/", deeds.add, name="add-model"),
    path("<int:pk>/", views.model, name="model"),
    path("<int:pk>/settings/", deeds.change, name="model-settings"),
    path("<int:pk>/load/", deeds.load, name="load-model"),
    path("<int:pk>/unload/", deeds.unload, name="unload-model"),
    path("<int:pk>/sleep/", deeds.sleep, name="sleep-model"),
    path("<int:pk>/wake/", deeds.wake, name="wake-model"),
    path("<int:pk>/restart/", deeds.restart, name="restart-replica"),
    path("<int:pk>/delete/", deeds.delete, name="delete-model"),
]
