"""The command line."""


def main() -> None:
    """Entry point of the console script; imports torch only when it is called."""
    from importlib.util import find_spec

    missing = [name for name in ("typer", "rich") if find_spec(name) is None]
    if missing:
        raise SystemExit(f"The command credo needs {' and '.join(missing)}: pip install 'credo[cli]'")
    from credo.cli.app import main as run

    run()
