"""The gateway's side of the engine protocol: routing, streams, failover.

One `EngineClient` per event loop: `get_engine_client()`. It sends requests to replicas, returns
their tokens to the callers, and moves open requests to another replica when one is lost.
"""
