"""Loops over pixels: gather, scale, crop. Compiled by numba where it is there, else by NumPy: the same bits."""
