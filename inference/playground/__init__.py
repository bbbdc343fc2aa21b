"""The playground's WebSocket, in parts: who may use it, and one answer on its way."""
