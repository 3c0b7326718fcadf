"""Where the memory of a traced step goes, and what would change that."""
