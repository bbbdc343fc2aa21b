"""`EngineCore.step()` and what it calls: validation, harvest, exits, counters."""
