"""Routes below `/console/models/`."""

from django.urls import path

from console.views import models

urlpatterns = [
    path("add/", models.add, name="add-model"),
    path("<int:pk>/", models.model, name="model"),
    path("<int:pk>/settings/", models.change, name="model-settings"),
    path("<int:pk>/load/", models.load, name="load-model"),
    path("<int:pk>/unload/", models.unload, name="unload-model"),
    path("<int:pk>/sleep/", models.sleep, name="sleep-model"),
    path("<int:pk>/wake/", models.wake, name="wake-model"),
    path("<int:pk>/restart/", models.restart, name="restart-replica"),
    path("<int:pk>/benchmark/", models.run_benchmark, name="start-benchmark"),
    path("<int:pk>/benchmark/stop/", models.end_benchmark, name="stop-benchmark"),
    path("<int:pk>/delete/", models.delete, name="delete-model"),
]
