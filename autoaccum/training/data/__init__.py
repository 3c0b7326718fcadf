"""Data of any kind as windows of one update each."""
