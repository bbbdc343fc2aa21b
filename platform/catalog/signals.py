"""Signals sent after a change is committed, in the process that committed it."""

from django.dispatch import Signal

#: A served model was loaded, unloaded or changed. Keyword: `served_model`.
served_model_changed = Signal()
