"""What may be rewritten: rule files, patterns, the language of their conditions, and their trial."""
