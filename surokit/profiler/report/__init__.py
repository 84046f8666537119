"""Report a profile: the Profile itself, its pictures, the difference of two, and advice that can be tried."""
