"""Token ids in, token ids out; and what turns requests into them."""
