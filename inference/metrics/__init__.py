"""Prometheus metrics, with vLLM's names, right with any number of gateway processes.

A process counts in plain numbers (`recorder`), adds what is new to one hash in Redis every second
(`flusher`), and `/metrics` shows the hash, the replicas' heartbeats and what each process says of
itself (`exposition`): the same answer whichever gateway is asked. So one of them is scraped, not
each.
"""
