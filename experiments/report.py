"""The command `raslik report`, from a checkout: python experiments/report.py --runs=..."""

from launch import main

if __name__ == "__main__":
    main()
