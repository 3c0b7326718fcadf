"""How well a model does between updates."""
