"""Guard against memory regressions: measure a training step, and compare it with a lock or another revision."""
