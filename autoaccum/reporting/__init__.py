"""Reports of results for people and programs: terminal, JSON, markdown, figures, and the emitted training step."""
