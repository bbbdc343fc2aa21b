"""The devices that run models, by name, and their capabilities."""

from engine.devices.device import CacheRequirements, Device, RunnerInputs

__all__ = ["CacheRequirements", "Device", "RunnerInputs"]
