"""Rows for a live server: run as a process of its own on a data dir with tables and no rows.

Two tenants. Ada belongs to Acme and may use the public models and Acme's; Olga belongs to Rival;
root runs the installation.
"""

from __future__ import annotations

import os

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")

import django

PASSWORD = "a quiet page of ink"


def main() -> None:
    """Make the rows."""
    django.setup()
    from tests.console.rows import make_rows

    make_rows()


if __name__ == "__main__":
    main()
