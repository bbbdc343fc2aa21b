"""Embeddings, scores, rankings and labels: the endpoints of pooling models."""
