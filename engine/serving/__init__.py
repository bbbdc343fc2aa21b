"""The engine as a process: Redis in, `EngineCore`, Redis out, heartbeats."""
