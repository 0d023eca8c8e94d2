"""The command `raslik quickstart`, from a checkout: python experiments/quickstart.py"""

from launch import main

if __name__ == "__main__":
    main()
