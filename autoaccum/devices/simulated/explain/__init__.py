"""Explanations of where the memory of a traced step goes, and of what would change that."""
