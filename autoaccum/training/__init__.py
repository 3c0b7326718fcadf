"""Training with a plan: data, updates, evaluations and checkpoints."""
