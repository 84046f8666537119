"""Run the command line: `python -m surokit plan 405e9` is `surokit plan 405e9`."""

from surokit.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
