"""The command `raslik run`, from a checkout: python experiments/run.py --flagfile=..."""

from launch import main

if __name__ == "__main__":
    main()
