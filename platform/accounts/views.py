"""Pages of accounts: accept an invitation, reset a password, end a session."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from allauth.account.internal.flows.login import perform_login
from allauth.account.models import Login
from allauth.account.views import password_reset as reset_by_mail
from allauth.usersessions.models import UserSession
from django import forms
from django.conf import settings
from django.contrib.auth.decorators import login_required
from django.contrib.auth.password_validation import password_validators_help_text_html
from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_http_methods, require_POST

from common.one_time import store_one_time
from engine.contract.errors import QuireError
from tenants import actions
from tenants.actors import to_actor
from tenants.audit import log_action


class JoinForm(forms.Form):
    """Username and password of a new user."""

    username = forms.CharField(
        max_length=150, widget=forms.TextInput(attrs={"class": "input", "autocomplete": "username"})
    )
    password = forms.CharField(
        widget=forms.PasswordInput(attrs={"class": "input", "autocomplete": "new-password"}),
        help_text=password_validators_help_text_html(),
    )


@require_http_methods(["GET", "HEAD", "POST"])
@sensitive_post_parameters("password")
@never_cache
def invitation(request: HttpRequest, token: str) -> HttpResponse:
    """Accept an invitation; anyone with the link can, once."""
    user: Any = request.user
    form = JoinForm(request.POST if request.method == "POST" and user.is_anonymous else None)
    try:
        pending = actions.get_open_invitation(token)
        if request.method == "POST" and user.is_authenticated:
            actions.accept_invitation(user=user, token=token)
            tenant = pending.tenant
            store_one_time(request, tenant=tenant.slug, text=f"Welcome to {tenant.name}.")
            return redirect(f"{reverse('members')}?{urlencode({'tenant': tenant.slug})}")
        if request.method == "POST" and form.is_valid():
            new_user = actions.sign_up_with_invitation(token=token, **form.cleaned_data)
            return perform_login(request, Login(user=new_user, redirect_url=reverse("playground")))
    except QuireError as error:
        if error.status == 404:
            return render(request, "console/invitation_gone.html", status=404)
        form.add_error(error.param if error.param in form.fields else None, error.message)
    context = {"invitation": pending, "form": form}
    return render(request, "console/invitation.html", context)


def password_reset(request: HttpRequest) -> HttpResponse:
    """Show allauth's page, or without a mail server, what to do instead."""
    if settings.QUIRE.smtp_url:
        return reset_by_mail(request)
    return render(request, "account/password_reset_by_operator.html")


@require_POST
@login_required
def end_session(request: HttpRequest, pk: int) -> HttpResponse:
    """End a session; its sockets close within two seconds. Raises Http404 for another user's."""
    user: Any = request.user
    session = UserSession.objects.filter(user=user, pk=pk).first()
    if session is None:
        raise Http404
    with transaction.atomic():
        log_action(to_actor(user), "session.end", user, ended_address=session.ip)
        session.end()
    return redirect("usersessions_list")
