"""Classes of other libraries that run the engine."""
