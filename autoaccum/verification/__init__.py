"""Verification: compare the accumulated update with the full batch's, and find the causes of a difference."""
