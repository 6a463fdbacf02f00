"""Data: built-in presets and what reads them."""
