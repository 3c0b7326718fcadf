"""What a training is written down as, and how it is put back."""
