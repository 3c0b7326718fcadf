"""HOW a batch becomes one optimizer step."""
