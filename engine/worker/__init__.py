"""Runs the model: holds the batch's state, prepares inputs, samples."""
