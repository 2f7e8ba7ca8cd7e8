"""Runs the command `paredown` when Python is called as `python -m paredown`."""

from paredown.cli import main

if __name__ == "__main__":
    main()
