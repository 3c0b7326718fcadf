"""Another revision of the user's repository, to be measured too."""
