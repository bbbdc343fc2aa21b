"""HTTP for the gateway: Django's handler without its thread hops, DRF's policies, JSON, SSE."""
