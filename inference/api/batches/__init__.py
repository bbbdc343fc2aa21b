"""`/v1/batches`: the requests of a file, run by a worker at low priority."""
