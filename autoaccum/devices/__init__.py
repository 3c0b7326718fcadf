"""WHAT a step costs, and where."""
