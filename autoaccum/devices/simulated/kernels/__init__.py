"""The kernels CUDA would choose, and the memory that they take and keep."""
