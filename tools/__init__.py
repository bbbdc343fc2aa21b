"""Programs for those who work on Quire."""
