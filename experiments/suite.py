"""The command `raslik suite`, from a checkout: python experiments/suite.py --out=..."""

from launch import main

if __name__ == "__main__":
    main()
