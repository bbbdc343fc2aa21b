"""The gateway's side of the engine protocol: routing, streams, failover.

One `EngineClient` an event loop: `get_engine_client()`. It gives requests to replicas, hands their
tokens to whoever asked, and moves open requests to another replica when one is lost.
"""
