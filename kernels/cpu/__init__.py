"""This folder has C++ for a CPU, built on first use where there is a compiler (build.py); else the reference serves."""
