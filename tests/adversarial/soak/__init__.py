"""A long mixed run of everything against an oracle: ``python -m tests.adversarial.soak --minutes 60``.

`plan` draws cases from a seed, `programs` runs them, `oracle` says what must come out, `watch` what they cost, and
`supervisor` ends what hangs, survives what crashes, and reports.
"""
