"""Read what a plan is about, once: a number of parameters, a config, a live model or its session."""
