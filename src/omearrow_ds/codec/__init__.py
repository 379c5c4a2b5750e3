"""OME-Arrow columns to arrays and back: the only encode and decode."""
