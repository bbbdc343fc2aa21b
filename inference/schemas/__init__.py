"""Request bodies, validated by pydantic in strict mode: neither "5" nor true is a number."""
