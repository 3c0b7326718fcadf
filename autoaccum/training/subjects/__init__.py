"""What is trained: a live model or a workload, and what it becomes when training begins."""
