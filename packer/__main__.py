"""`python -m packer` is the same program as `packer`."""

from packer.cli import main

if __name__ == "__main__":
    main()
