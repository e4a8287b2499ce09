"""A run's folder as a live page."""
