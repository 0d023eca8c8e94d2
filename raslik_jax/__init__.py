"""Finds the training examples behind a bad generation, and unlearns them."""

__version__ = "0.1.0"
