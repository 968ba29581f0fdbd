"""Time and memory against the peers and a plain epoch, side by side: `make bench`, or `python -m benchmarks`."""
