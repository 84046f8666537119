"""Record a profiled block, with hooks and torch's profiler while it runs, or read a trace file; both become a Recording."""
