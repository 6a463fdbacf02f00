"""A model's description, lowered to the kernels of each kind of device. Each walks the sublayers once."""
