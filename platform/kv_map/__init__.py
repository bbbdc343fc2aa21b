"""The KV map: a live view of a replica's KV blocks, limited to what the viewer may see."""
