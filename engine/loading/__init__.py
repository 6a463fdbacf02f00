PIECE_BYTES = 64 << 20
"""The most bytes of a matrix, as the file holds them, that are in memory beside the device's copy while it is made."""
