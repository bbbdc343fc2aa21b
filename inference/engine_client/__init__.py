"""The gateway's side of the engine protocol: routing, streams, failover.

One `EngineClient` an event loop: `get_engine_client()`. It gives requests to replicas, hands their
tokens to whoever asked, and moves open requests to another replica when one is lost.
"""

from inference.engine_client.client import EngineClient
from inference.engine_client.current import close_engine_client, get_engine_client
from inference.engine_client.mailbox import Mailbox, Piece
from inference.engine_client.submission import Submission

__all__ = [
    "EngineClient",
    "Mailbox",
    "Piece",
    "Submission",
    "close_engine_client",
    "get_engine_client",
]
