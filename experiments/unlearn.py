"""The command `raslik unlearn`, from a checkout: python experiments/unlearn.py --run=..."""

from launch import main

if __name__ == "__main__":
    main()
