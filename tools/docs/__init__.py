"""Pages of docs/ that programs write."""
