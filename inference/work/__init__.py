"""Work that outlives a request: what a worker process runs, and how it's asked to."""
