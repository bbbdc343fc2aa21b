"""Speculation: guesses at coming tokens, which the model checks several at a time.

A draft holds if it is the very token that the target's own draw gives at its position, with its
seed, penalties, bias and all; so nothing that a client sees depends on drafts, only how soon.
"""
