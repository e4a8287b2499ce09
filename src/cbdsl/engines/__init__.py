"""Engines train and score stacks of models; `base.Engine` is the interface."""
