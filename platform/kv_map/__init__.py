"""The KV map: a replica's blocks as they are now, for whom they may be shown to."""
