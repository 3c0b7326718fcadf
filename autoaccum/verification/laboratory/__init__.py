"""Runs of one batch, whole and in parts, from equal copies and under equal draws."""
