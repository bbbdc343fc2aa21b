"""Quire's version. The distribution and `GET /version` read it here."""

__version__ = "0.1.0"
