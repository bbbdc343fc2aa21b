"""Incremental parsing of a model's output into content, reasoning and tool calls."""
