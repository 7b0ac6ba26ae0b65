"""Toy: a stack of linear blocks that learns a slope, and can stop after any of them."""
