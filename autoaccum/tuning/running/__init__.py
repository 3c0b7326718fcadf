"""Trials of a study: real trainings, each in a process of its own."""
