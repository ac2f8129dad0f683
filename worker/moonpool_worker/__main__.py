"""``python -m moonpool_worker``."""

from moonpool_worker.cli import main

if __name__ == "__main__":
    main()
