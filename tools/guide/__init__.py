"""How the built-in model orin-guide is made: what it knows, the corpus of that, its training and its file."""
