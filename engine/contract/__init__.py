"""The engine's torch-free interface: what higher layers import, along with `engine.text`."""
