"""Signals sent once a change is committed, in the process that made it."""

from django.dispatch import Signal

#: A price or a budget was set or taken away.
rules_changed = Signal()
