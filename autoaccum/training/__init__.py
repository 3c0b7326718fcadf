"""Training by a plan: windows of data, updates, evaluation, checkpoints."""
