"""Ask a plan backwards: what fits, what would make it fit, what is faster. Each answer is found by planning again."""
