"""Where models run: each device by name, and what it can do."""

from engine.devices.device import CacheRequirements, Device, RunnerInputs

__all__ = ["CacheRequirements", "Device", "RunnerInputs"]
