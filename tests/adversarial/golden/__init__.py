"""Golden files: small collections of every format, kept as they were written, that must stay readable for ever.

`content` says what they hold, by formulas; `own` and `foreign` how each was written; `archive` where they lie.
"""
