"""Pages. What they show comes from `console.api`, asked for by their scripts."""

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from console.mounting import mounted
from console.sampling_fields import GROUPS

#: Where `inference.routing` has the playground's WebSocket.
SOCKET_PATH = "/ws/playground/"

#: Openings for a blank page, of a kind that a small model can answer too.
STARTERS = (
    "What is the capital of Portugal?",
    "What is 17 + 25?",
    "Tell me a short story about a fox.",
)


@require_safe
@never_cache
@login_required
def playground(request: HttpRequest) -> HttpResponse:
    """Chat with a model over a WebSocket."""
    context = {"groups": GROUPS, "socket_path": mounted(SOCKET_PATH), "starters": STARTERS}
    return render(request, "console/playground.html", context)
