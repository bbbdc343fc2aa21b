"""Patterns of a stranger's file, which name layers: matched in bounded steps."""

from engine.name_patterns.name_pattern import NamePattern

__all__ = ["NamePattern"]
