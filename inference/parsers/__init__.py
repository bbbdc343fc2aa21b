"""A model's text taken apart as it comes: tool calls, reasoning."""
