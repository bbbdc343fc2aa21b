"""`EngineCore.step()` and its parts: validation, admission, outputs, statistics."""
