"""Figures and HTML pages of recorded results. Nothing here runs an experiment."""
