"""Programs for Quire's developers."""
