"""What runs within other libraries' loops, one module for each library; each is imported only by its users."""
