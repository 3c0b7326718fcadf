"""The random draws of one run, given to another of the same batch."""
