"""Whether samples depend on the others they are run with: how the experiment goes about it."""
