"""A chat turn: render, admit, generate, split into reasoning, content and calls.

Every endpoint that answers chats is built on it: `ChatSession.start` takes a checked `ChatRequest`,
and `next` gives `TurnDelta`s until `finished`.
"""
