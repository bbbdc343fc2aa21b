"""Where models run: each device by name, and what it can do."""

from engine.devices.device import CacheNeed, Device, RunnerParts

__all__ = ["CacheNeed", "Device", "RunnerParts"]
