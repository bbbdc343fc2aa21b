"""A chat turn: render, admit, generate, split into reasoning, content and calls.

All chat endpoints are built on it: `ChatSession.start` takes a validated `ChatRequest`, and `next`
returns `TurnDelta`s until `finished`.
"""
