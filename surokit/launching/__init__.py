"""Start the processes of a run from a notebook's cell or a shell, on torchelastic's agent."""
