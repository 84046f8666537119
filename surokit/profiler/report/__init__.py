"""What is told of a profile: the Profile, its pictures, differences of two, and advice that can be tried."""
