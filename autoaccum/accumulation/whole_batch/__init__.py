"""What needs all samples of an update at once: exact BatchNorm, losses that compare samples, `whole_batch(x)`."""
