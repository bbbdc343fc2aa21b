"""`EngineCore.step()` and what it calls: validation, outputs, ends, counters."""
