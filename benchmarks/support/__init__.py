"""What benchmarks are made of: data, workloads, references, controls, and what is recorded of them."""
