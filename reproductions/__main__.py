"""`python -m reproductions`; the workers of a command import this module, too."""

from reproductions.command import main

if __name__ == "__main__":
    main()
