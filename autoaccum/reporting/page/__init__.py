"""Results as one HTML page: its blocks, its charts, and the sections of each command."""
