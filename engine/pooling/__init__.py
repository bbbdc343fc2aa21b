"""Pooling models: vectors, labels and scores in place of text.

`params` doesn't import torch and is part of the interface to upper layers; the rest runs in the
replica.
"""
