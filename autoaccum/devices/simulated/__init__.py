"""The device of a simulated card: trials that are traced in a child and replayed."""
