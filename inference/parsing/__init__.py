"""A model's text taken apart as it comes: what every tool and reasoning parser is made of."""

from inference.parsing.parts import Part, PartKind

__all__ = ["Part", "PartKind"]
