"""Which kernel CUDA would choose, and the memory that it takes and keeps."""
