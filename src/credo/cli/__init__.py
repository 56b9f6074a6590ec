"""The command line."""


def main() -> None:
    """Entry point of the console script; imports torch only when it is called."""
    from credo.cli.app import main as run

    run()
