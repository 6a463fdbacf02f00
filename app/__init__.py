"""The application: command line, full-screen chat, line mode, history and settings."""
