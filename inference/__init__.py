"""Quire's data plane: the OpenAI-compatible gateway between clients and engine replicas."""
