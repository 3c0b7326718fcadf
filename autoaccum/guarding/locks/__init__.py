"""The lock file: entries as text that is read in a diff, and read back or refused."""
