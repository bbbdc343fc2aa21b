"""Runs the model: keeps the batch's state, prepares inputs, samples."""
