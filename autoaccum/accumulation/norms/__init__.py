"""What BatchNorm sees and remembers of an update in parts, by mode."""
