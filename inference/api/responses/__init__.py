"""`/v1/responses`: stored responses, in one body, as a stream or in the background."""
