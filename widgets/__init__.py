"""The parts of the screen. Immutable data goes in, messages come out; no widget knows an engine."""
