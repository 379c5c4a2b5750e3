"""Batches of a dataset, by a DataLoader: its settings, epochs, workers and seeds."""
