"""The kernels of a model on a GPU: a handler for each kind of sublayer, and what the handlers of a step share."""
