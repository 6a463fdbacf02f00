"""Models by name: what is known, what is on this machine, and how the rest gets here. No tinygrad."""
