"""`python -m msrun`."""

from msrun.cli.main import console

if __name__ == "__main__":
    console()
