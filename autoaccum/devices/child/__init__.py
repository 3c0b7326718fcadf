"""Child processes that run trials: how they are started, asked, and end, from both sides."""
