"""What a plan is about, read once: a number of parameters, a config, a live model or its session."""
