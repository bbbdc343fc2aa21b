"""Celery tasks of this app."""

from __future__ import annotations

import logging

from celery import shared_task

from tenants import audit_retention
from tenants.actions.tenants import ERASE, erase_tenant_data, run_pending_erasures
from tenants.models import Tenant

logger = logging.getLogger(__name__)


@shared_task(name=ERASE)
def erase(pk: int) -> None:
    """Erase the data of a tenant marked for erasure."""
    tenant = Tenant.objects.exclude(erase_requested_at=None).filter(pk=pk).first()
    if tenant is not None:
        erase_tenant_data(tenant=tenant)


@shared_task(name="tenants.erasures")
def erasures() -> None:
    """Resume erasures whose worker died, and erase data that arrived late."""
    if removed := run_pending_erasures():
        logger.info("removed %d rows of erased tenants", removed)


@shared_task(name="tenants.audit_retention")
def remove_old_audit() -> None:
    """Delete expired rows of the audit log."""
    if removed := audit_retention.remove_old():
        logger.info("removed %d rows of the audit log", removed)
