"""The command `raslik index`, from a checkout: python experiments/index.py ..."""

from launch import main

if __name__ == "__main__":
    main()
