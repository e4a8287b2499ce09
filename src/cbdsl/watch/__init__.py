"""A live page of a run or a sweep, made from its folder alone."""
