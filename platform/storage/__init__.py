"""Tenants' stored objects: files, batches of requests, responses, conversations."""
