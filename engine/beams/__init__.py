"""Beam search: several continuations of a prompt side by side, the likeliest of them kept."""
