"""A page that shows a run's folder while it is written and afterwards. It reads, and nothing waits for it."""
