"""The makings of benchmarks: data, workloads, references, controls, and the recorder of what they find."""
