"""What is seen of a profiled block: hooks and torch's profiler while it runs, or a trace file; both become a Recording."""
