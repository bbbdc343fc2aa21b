"""The torch-free face of the engine: what the storeys above import, beside `engine.text`."""
