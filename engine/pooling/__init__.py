"""Pooling models: vectors, labels and scores in place of text.

`params` is torch-free and part of the face to the storeys above; the rest runs in the replica.
"""
