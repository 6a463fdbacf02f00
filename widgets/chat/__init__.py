"""The conversation: the transcript, the prompt, and the lines around them."""
