"""`python -m cellar`."""

from cellar.cli.main import main

if __name__ == "__main__":
    main()
