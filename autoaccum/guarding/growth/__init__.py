"""What grew between two measurements, by purpose and module."""
