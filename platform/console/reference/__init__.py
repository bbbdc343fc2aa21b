"""`/reference/`: the gateway's OpenAPI document as a page of our own, made on the server."""
