"""Advice that is measured: where the time of an epoch goes, which format and which settings."""
