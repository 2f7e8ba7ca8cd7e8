"""`python -m paredown` is `paredown`."""

from paredown.cli import main

if __name__ == "__main__":
    main()
