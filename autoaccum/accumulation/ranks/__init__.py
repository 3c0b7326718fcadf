"""One update over several ranks: what they tell each other, and the sums of their gradients."""
