"""What is kept on disk between runs, and which results of searches are on trial."""
