"""Signals sent after a change is committed, in the process that committed it."""

from django.dispatch import Signal

#: A price or a budget was set or removed.
rules_changed = Signal()
