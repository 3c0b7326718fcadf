"""Records, drawn for people: terminal, JSON."""
