"""What the trials came to: pure decisions over records."""
