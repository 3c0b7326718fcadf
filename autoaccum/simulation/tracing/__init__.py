"""A training step on fake CUDA tensors, traced: what it asks a card's allocator for."""
