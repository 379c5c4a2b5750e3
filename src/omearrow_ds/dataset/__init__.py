"""Samples of a collection: PyTorch datasets, their memory, batches and targets."""
