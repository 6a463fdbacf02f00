"""What the terminal is sent, and what comes from it: frames, pictures, pastes, signals."""
