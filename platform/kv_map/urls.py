"""The KV map's routes below `/api/`."""

from rest_framework.routers import SimpleRouter

from kv_map.views import BlockMapViewSet, IsolationCheckViewSet

router = SimpleRouter()
router.register("blocks", BlockMapViewSet, "api-blocks")
router.register("isolation", IsolationCheckViewSet, "api-isolation")

urlpatterns = router.urls
