"""Engines that are servers: llama.cpp's beside us, or any that speaks OpenAI's protocol."""
