"""Whether a growth is a regression, and how that is said."""
