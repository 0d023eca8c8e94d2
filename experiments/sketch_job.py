"""The command `raslik sketch_job`, from a checkout: python experiments/sketch_job.py ..."""

from launch import main

if __name__ == "__main__":
    main()
