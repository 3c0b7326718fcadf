"""Which cases a call is about, and how much they may grow."""
