"""`python -m cellar`, and the installed command: what processes that these start import again before anything else."""


def main() -> None:
    """Run the command line."""
    from cellar.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
