"""What crosses the process boundary between the application and the engine, and both ends of it."""
