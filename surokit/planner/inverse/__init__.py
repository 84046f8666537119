"""A plan asked backwards: what fits, what would make it fit, what is faster. Each answer is planned again."""
