"""Signals sent once a change is committed, in the process that made it."""

from django.dispatch import Signal

#: What a name stands for, or whose it is, has changed. Keyword: `adapter`.
adapters_changed = Signal()
#: A version waits to be fetched or checked. Keyword: `version`.
version_waits = Signal()
