"""Planning: search for the largest micro-batch that fits, and keep it as a plan."""
