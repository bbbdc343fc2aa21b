"""An output stream as a response."""
