"""A plan beside a measurement, or beside published runs."""
