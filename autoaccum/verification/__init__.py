"""Is the accumulated gradient the full batch's, and if not, why."""
