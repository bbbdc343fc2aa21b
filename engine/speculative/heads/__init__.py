"""Heads that go on from the model's last hidden state, in their published checkpoint layouts."""
