"""Child processes: how they start, are called and end, from both sides of their connection."""
