"""HOW MUCH fits."""
