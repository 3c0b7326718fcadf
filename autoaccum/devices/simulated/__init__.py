"""A GPU that is not there: a training step on fake tensors, and its allocations replayed through an allocator."""
