"""What the program asks of Python and the operating system."""
