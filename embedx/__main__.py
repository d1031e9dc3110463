"""``python -m embedx``."""

from embedx.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
