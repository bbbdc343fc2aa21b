"""Prometheus metrics with vLLM's names, correct for any number of gateway processes.

A process counts in plain numbers (`recorder`) and adds the increments to one hash in Redis every
second (`flusher`). `/metrics` shows the hash, the replicas' heartbeats and each process's own
metrics (`exposition`), so every gateway returns the same and only one of them must be scraped.
"""
