"""The study: what Optuna keeps, who works on it, which setting is tried next."""
