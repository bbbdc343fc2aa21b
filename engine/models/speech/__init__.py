"""Audio encoders, their projectors, and the Whisper model."""
