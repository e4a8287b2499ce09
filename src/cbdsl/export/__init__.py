"""Predictions with a trained model, and its export to other programs."""
