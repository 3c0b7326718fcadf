"""The parts of the file that `autoaccum plan --emit` writes."""
