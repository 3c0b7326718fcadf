"""What a case takes now."""
