"""Read what is planned: a number of parameters, a config, a live model or its session."""
