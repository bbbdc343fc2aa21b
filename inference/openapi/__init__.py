"""The OpenAPI document: made by drf-spectacular from the views and their schemas."""
