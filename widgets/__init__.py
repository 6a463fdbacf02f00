"""What is seen. Widgets take data and post messages; they know no engine."""
