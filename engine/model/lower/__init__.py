"""A model's description, lowered to the kernels of each kind of device. Each walks the sublayers once."""

REWIND = 512
"""Tokens by which a sequence may be cut back at least, in a layer with a window."""
