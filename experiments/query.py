"""The command `raslik query`, from a checkout: python experiments/query.py ..."""

from launch import main

if __name__ == "__main__":
    main()
