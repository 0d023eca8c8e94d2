"""The command `raslik trace`, from a checkout: python experiments/trace.py --checkpoint=..."""

from launch import main

if __name__ == "__main__":
    main()
