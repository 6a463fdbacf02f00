"""Engines that are servers: llama.cpp's llama-server, and any server with OpenAI's protocol."""
