"""The causes of an unequal accumulated update: the search, and one module for each family of causes."""
