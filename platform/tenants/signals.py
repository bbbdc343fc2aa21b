"""Signals sent after a change is committed, in the process that committed it."""

from django.dispatch import Signal

#: A key was created, revoked or changed. Keyword: `key`.
api_key_changed = Signal()
#: A tenant, its limits or its members changed. Keyword: `tenant`.
tenant_changed = Signal()
#: All sessions of a user were ended. Keyword: `user`.
access_revoked = Signal()
