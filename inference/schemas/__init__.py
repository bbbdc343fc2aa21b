"""Bodies of requests, checked by pydantic. Types are strict: "5" is no number, true is no 1."""
