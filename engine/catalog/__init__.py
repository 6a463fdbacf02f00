"""Models by name: which ones are known, which ones are on this machine, and how to download the others.

Nothing here needs tinygrad.
"""
