"""Measured advice: the time of an epoch by stage, and the best format and settings."""
