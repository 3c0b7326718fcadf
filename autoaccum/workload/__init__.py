"""WHAT is trained: the user's model, batches, loss and what that loss divides by."""
