"""The trained model, used and passed on: predictions, and files for other programs."""
