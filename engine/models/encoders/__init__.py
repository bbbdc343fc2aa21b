"""Bidirectional encoders: one implementation of the BERT-like families, described by data."""
