"""The loop and what it keeps: optimiser, averages of the weights, checkpoints."""
