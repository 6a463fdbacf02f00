"""What measures and pictures the program: docs/measuring.md lists it. It runs from a checkout and is not installed."""
