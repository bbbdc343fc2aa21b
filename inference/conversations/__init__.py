"""`/v1/conversations`: items that responses read and add to."""
