"""Submission, detokenization, stop strings, usage and billing, shared by all endpoints."""
