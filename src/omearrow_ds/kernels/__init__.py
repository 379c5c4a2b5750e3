"""Loops to gather, scale and crop pixels, with numba if installed, else with NumPy and equal results."""
