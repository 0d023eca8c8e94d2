"""The command `raslik export`, from a checkout: python experiments/export.py --run=... --out=..."""

from launch import main

if __name__ == "__main__":
    main()
