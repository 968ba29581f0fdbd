"""Time and memory compared with other packages and a plain epoch: `make bench`, or `python -m benchmarks`."""
