"""`/v1/responses`: answers that remember, in one body, as a stream or in the background."""
