"""Models that hear: encoders of sound, and decoders that attend to their states."""
