"""The workload to train: the user's model, batches and loss, and the number that the mean in the loss divides by."""
