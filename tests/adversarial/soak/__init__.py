"""A long mixed run of everything against an oracle: ``python -m tests.adversarial.soak --minutes 60``.

`plan` draws cases from a seed, `programs` runs them, `oracle` computes the right results, and `watch` measures memory.
`supervisor` ends hanging cases, continues after crashes, and collects reports.
"""
