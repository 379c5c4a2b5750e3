"""Golden files: small collections of every format that every later version must read.

`content` computes their content, `own` and `foreign` write them, and `archive` stores them.
"""
