"""What is computed of a Recording: who asked for each piece of work, what it was for, what was lost to which cause."""
