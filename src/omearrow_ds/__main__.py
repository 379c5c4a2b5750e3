"""``python -m omearrow_ds``: the command ``omearrow-ds``."""

from omearrow_ds.cli import main

if __name__ == "__main__":
    main(prog_name="omearrow-ds")
