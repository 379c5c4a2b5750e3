"""The tracks: what each measures, and how it is shown."""
