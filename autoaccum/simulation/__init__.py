"""A card that is not here: a training step on fake tensors, and its allocations replayed through an allocator."""
