"""The fixtures of a simulated card."""

from simulated_fixtures import explained, mode, simulated

__all__ = ["explained", "mode", "simulated"]
