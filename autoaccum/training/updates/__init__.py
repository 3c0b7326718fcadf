"""How one window becomes one update: the ceiling, the step, its peak and its noise."""
