"""The command `raslik choose`, from a checkout: python experiments/choose.py --runs=..."""

from launch import main

if __name__ == "__main__":
    main()
