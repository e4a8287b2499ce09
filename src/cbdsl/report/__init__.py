"""Figures and pages: they read what a run recorded and never run anything."""
