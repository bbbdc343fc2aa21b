"""From messages and texts to token ids, where that can't block the event loop."""
