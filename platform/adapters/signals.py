"""Signals sent after a change is committed, in the process that committed it."""

from django.dispatch import Signal

#: The version behind a name, or its owner, changed. Keyword: `adapter`.
adapters_changed = Signal()
#: A version waits for its download or check. Keyword: `version`.
version_waits = Signal()
