"""Inference: everything between a conversation and the events of its answer. Imports no user interface."""
