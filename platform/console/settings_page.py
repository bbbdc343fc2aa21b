"""The page of settings in force: each with its value and where that came from. For operators."""

from __future__ import annotations

from itertools import groupby

from django.contrib.auth.decorators import login_required
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from catalog.access import access_catalog
from config.in_force import in_force
from tenants.actors import as_actor


@require_safe
@never_cache
@login_required
def settings(request: HttpRequest) -> HttpResponse:
    """All settings of this gateway, and what models set. 403 for all but operators."""
    if not as_actor(request.user).is_operator:
        raise PermissionDenied
    found = in_force()
    models = [
        (model, sorted(model.settings.items())) for model in access_catalog(request.user)[:200]
    ]
    context = {
        "groups": [(title, list(each)) for title, each in groupby(found, lambda one: one.group)],
        "changed": sum(each.source != "default" for each in found),
        "count": len(found),
        "models": models,
    }
    return render(request, "console/settings.html", context)
