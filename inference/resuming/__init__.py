"""Streams that another gateway goes on with: `Last-Event-ID` with the same request.

Each event of a stream has an id that says how far the client has come. The tokens are kept in Redis
(`inference.engine_client.journal`); who goes on writes the stream again from them, without what the
client has. That's the same stream, since it's made of the request, its id, its seed and its tokens
alone.
"""
