"""Speculative decoding: draft tokens, of which the model verifies several in one step.

A draft is accepted if it equals the token that the target model samples at its position, with the
sequence's seed, penalties and bias. So drafts change only the speed, never the output.
"""
