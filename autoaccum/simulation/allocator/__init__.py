"""PyTorch's caching allocator in Python, and traces replayed through it."""
