"""Ways to get the same gradient from less memory of the device, for time or for memory of the host."""
