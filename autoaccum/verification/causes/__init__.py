"""Why an accumulated update differs: the search for causes, and one module for each family of them."""
