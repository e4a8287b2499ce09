"""Codecs: models as few bytes."""
