"""Trials of a training command as it is: it runs in its own processes, watched from inside."""
