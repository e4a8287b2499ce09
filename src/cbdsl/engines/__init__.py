"""Engines train and score stacks of models; `engine.Engine` is the interface."""
