"""The command line."""


def main() -> None:
    """Entry point of the console script; imports torch only when a command runs."""
    from credo.cli.app import main as run

    run()
