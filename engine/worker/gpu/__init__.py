"""Steps on a GPU: device inputs, CUDA graphs and their dispatch, memory."""
