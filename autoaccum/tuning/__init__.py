"""`tune`: the learning rate, the micro-batch and, on request, the effective batch, searched for with Optuna."""
