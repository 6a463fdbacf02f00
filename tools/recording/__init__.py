"""Records the chat with the real engine as an animated picture: python -m tools.recording FILE.svg"""
