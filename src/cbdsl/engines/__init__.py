"""Engines train and score stacks of models; see `base.Engine` for the contract."""
