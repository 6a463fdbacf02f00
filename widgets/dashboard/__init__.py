"""The panes of the dashboard, of a comparison and of the screen of a server."""
